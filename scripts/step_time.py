"""Predict how long a training step takes, from floating-point operations and bytes moved.

    python scripts/step_time.py --gpu h100 --config examples/cli_configs/rloo_7b_8_gpus.yaml

takes the options of `trl memory-plan` after its own, and prints that plan with the seconds of each
phase. It is meant for comparing settings, and for planning a run before the machines are available.
A real step takes longer, because launches of small kernels, reward functions and waiting for the
longest completion of other ranks are not counted. Sources:

- operations: Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1 (2 N per
  token forward, 4 N backward), and Chowdhery et al., "PaLM", 2022, appendix B (attention);
- bytes of ZeRO: Rajbhandari et al., "ZeRO", 2020, section 7 (a ring moves (R-1)/R of the data);
- decoding: Pope et al., "Efficiently Scaling Transformer Inference", 2022, section 2 (weights and
  cache are read once per token).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields, replace

from trl.cli.launch import launch_options, split_arguments
from trl.cli.memory_plan import make_parser, plan_of
from trl.memory.estimate import Estimate
from trl.memory.model_size import FLOAT32, ModelSize
from trl.memory.plan import Plan, render, table
from trl.memory.rank_memory import RankMemory
from trl.memory.settings import RunSettings


@dataclass(frozen=True)
class Machine:
    """The performance of a GPU and its connections. Bandwidths are bytes per second, one-way."""

    flops: float  # peak dense bfloat16 operations per second
    hbm: float  # bandwidth of the GPU's memory
    link: float  # bandwidth to GPUs of the same machine
    network: float  # bandwidth of a GPU to other machines
    mfu: float = 0.4  # share of `flops` that training and prefill reach
    hbm_share: float = 0.6  # share of `hbm` that decoding and updates reach
    link_share: float = 0.7  # share of `link` and `network` that collectives reach
    host: float = 25e9  # bandwidth to the host's memory, and of an update there
    gpus: int = 8  # GPUs per machine

    def replace(self, **changes: float) -> Machine:
        """Return a copy with other figures.

        Raises:
            ValueError: a figure is unknown, or is not above 0.
        """
        names = {field.name for field in fields(self)}
        for name, value in changes.items():
            if name not in names:
                raise ValueError(f"hardware: {name} is none of {', '.join(sorted(names))}.")
            if not value > 0:
                raise ValueError(f"hardware: {name}={value} must be above 0.")
        return replace(self, **changes)  # type: ignore[arg-type]

    def ring(self, byte_count: float, ranks: int, across: bool = False) -> float:
        """Return the seconds of a ring all-gather or reduce-scatter.

        Args:
            byte_count: bytes of all ranks together.
            ranks: number of ranks in the ring.
            across: whether each rank is on another machine.
        """
        slowest = self.network if across or ranks > self.gpus else self.link
        return byte_count * (ranks - 1) / ranks / (slowest * self.link_share)


# From NVIDIA's data sheets: NVLink in one direction, and 200 or 400 Gb/s of InfiniBand per GPU.
MACHINES = {
    "a100": Machine(flops=312e12, hbm=2.039e12, link=300e9, network=25e9),
    "h100": Machine(flops=989e12, hbm=3.35e12, link=450e9, network=50e9),
    "h200": Machine(flops=989e12, hbm=4.8e12, link=450e9, network=50e9),
}


@dataclass(frozen=True)
class Seconds:
    """The seconds of a phase of a step."""

    compute: float = 0.0  # operations
    memory: float = 0.0  # reads and writes of the GPU's memory, or the host's
    communication: float = 0.0  # between GPUs
    overlaps: bool = False  # whether communication overlaps with the other two

    @property
    def total(self) -> float:
        """Seconds of the phase. Operations and memory accesses always overlap."""
        busy = max(self.compute, self.memory)
        return max(busy, self.communication) if self.overlaps else busy + self.communication


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer update."""

    model: ModelSize
    run: RunSettings
    machine: Machine
    parallel: int = 1  # GPUs across which a generation engine shards the weights

    @property
    def phases(self) -> dict[str, Seconds]:
        """Seconds of each phase of one update."""
        phases = {"prefill": self.prefill(), "decoding": self.decoding()}
        if self.run.reference or self.run.scores_policy:
            phases["scoring"] = self.scoring()
        phases["forward + backward"] = self.training()
        phases["optimizer"] = self.update()
        return phases

    @property
    def total(self) -> float:
        """Seconds of one update."""
        return sum(phase.total for phase in self.phases.values())

    # --- Counts ---

    @property
    def rounds(self) -> float:
        """Rollout batches generated per update."""
        return self.run.accumulation / (self.run.slices * self.run.passes)

    @property
    def _tokens(self) -> int:
        """Tokens in the forward of a micro-batch."""
        return sum(self.run.forward_passes(cuts=False))

    def _operations(self, tokens: float) -> float:
        """Return the operations of a forward of `tokens` tokens.

        A token takes 2 operations per weight, and 4 per attended position and query channel.
        """
        model = self.model
        # Embedding lookups are free.
        weights = model.parameters if model.tied else model.parameters - model.head
        attended_positions = self.run.prompt + self.run.completion / 2
        attention = 4 * model.queries * model.layers * attended_positions
        return tokens * (2 * weights + attention)

    def _compute_seconds(self, operations: float) -> float:
        return operations / (self.machine.flops * self.machine.mfu)

    def _memory_seconds(self, byte_count: float) -> float:
        return byte_count / (self.machine.hbm * self.machine.hbm_share)

    @property
    def _gather_seconds(self) -> float:
        """Seconds to gather all weights from their shards; 0 if they are not sharded."""
        run = self.run
        if not run.sharding.divides_weights:
            return 0.0
        bytes_per_weight = run.weight_bytes if run.matrix_bytes is None else run.matrix_bytes
        return self.machine.ring(bytes_per_weight * self.model.parameters, run.sharding.ranks)

    # --- Phases ---

    def prefill(self) -> Seconds:
        """Return the time of the prompts' forward, with sharded weights gathered once."""
        rows, prompts = self._in_flight
        tokens = self.run.rows / rows * prompts * self.run.prompt
        return Seconds(
            compute=self.rounds * self._compute_seconds(self._operations(tokens)),
            communication=self.rounds * self._gather_seconds,
        )

    def decoding(self) -> Seconds:
        """Return the time of decoding. Each token reads all weights and the KV cache."""
        run = self.run
        rows, prompts = self._in_flight
        steps = self.rounds * -(-run.rows // rows) * run.completion
        cache_per_token = Estimate(self.model, run).layer.cache * self.model.layers
        cache = cache_per_token * (prompts * run.prompt + rows * run.completion / 2)
        weights = run.product_bytes * self.model.parameters / self.parallel
        # If shards are gathered layer by layer, every token communicates all weights.
        gathers_each_step = not (run.gathers or self._uses_engine)
        return Seconds(
            compute=self._compute_seconds(steps * self._operations(rows)),
            memory=steps * self._memory_seconds(weights + cache),
            communication=steps * self._gather_seconds if gathers_each_step else 0.0,
        )

    @property
    def _in_flight(self) -> tuple[int, int]:
        """Rows that decode together, and their prompts. An engine decodes all rows together."""
        run = self.run
        if self._uses_engine:
            return run.rows, run.groups(run.rows)
        return Estimate(self.model, run).in_flight()

    @property
    def _uses_engine(self) -> bool:
        return self.run.engine_bytes is not None

    def scoring(self) -> Seconds:
        """Return the time of forwards without gradient, of the policy and the reference."""
        models = int(self.run.reference) + int(self.run.scores_policy)
        forwards = models * self.run.slices * self.rounds
        return Seconds(
            compute=forwards * self._compute_seconds(self._operations(self._tokens)),
            communication=forwards * self._gather_seconds,
            overlaps=True,
        )

    def training(self) -> Seconds:
        """Return the time of the forwards and backwards of an update."""
        run = self.run
        # In units of a forward, the backward takes 2: gradients of activations and of weights. The
        # latter are not computed for frozen weights. Gradient checkpointing repeats the forward.
        forward_units = 2 if self.model.frozen else 3
        if run.gradient_checkpointing:
            forward_units += 1
        operations = run.accumulation * forward_units * self._operations(self._tokens)
        # Weights are gathered for the forward, and again for the backward unless they are kept.
        gathers = run.accumulation * (1 if run.sharding.keeps_weights else 2)
        return Seconds(
            compute=self._compute_seconds(operations),
            communication=gathers * self._gather_seconds + self._reduce_seconds,
            overlaps=True,
        )

    @property
    def _reduce_seconds(self) -> float:
        """Seconds to sum the gradients of an update over the ranks."""
        run = self.run
        sharding = run.sharding
        gradient_bytes = RankMemory(self.model, run).trained * self.model.trainable
        if not sharding.stage:
            return 2 * self.machine.ring(gradient_bytes, run.processes)  # reduce-scatter, gather
        syncs_each_batch = sharding.syncs and sharding.stage > 1
        reductions = run.accumulation if syncs_each_batch else 1
        return reductions * self._reduce_scatter_seconds(gradient_bytes)

    def _reduce_scatter_seconds(self, byte_count: float) -> float:
        """Return the seconds to reduce within each replica, then each shard across replicas."""
        ranks = self.run.sharding.ranks
        replicas = self.run.processes // ranks
        across_replicas = self.machine.ring(byte_count / ranks, replicas, across=True)
        return self.machine.ring(byte_count, ranks) + 2 * across_replicas

    def update(self) -> Seconds:
        """Return the time of the optimizer step.

        States, weights and gradients are read and written once. ZeRO-1 and ZeRO-2 then gather the
        weights.
        """
        run = self.run
        sharding = run.sharding
        own_weights = sharding.fraction(1) * self.model.trainable
        state_bytes = RankMemory(self.model, run).optimizer
        byte_count = 2 * state_bytes + (FLOAT32 + run.weight_bytes) * own_weights
        if sharding.offloads_optimizer:
            memory_seconds = byte_count / self.machine.host
        else:
            memory_seconds = self._memory_seconds(byte_count)
        gather_seconds = 0.0
        if sharding.is_zero and 0 < sharding.stage < 3:
            weight_bytes = run.weight_bytes * self.model.trainable
            gather_seconds = self.machine.ring(weight_bytes, sharding.ranks)
        return Seconds(memory=memory_seconds, communication=gather_seconds)


def render_time(step: StepTime) -> str:
    """Render the times as a text table, with the assumptions."""
    rows = [["predicted seconds of", "compute", "memory", "communication", "total"]]
    for name, phase in step.phases.items():
        seconds = (phase.compute, phase.memory, phase.communication, phase.total)
        rows.append([name, *map(_format_seconds, seconds)])
    rows.append(["an update", "", "", "", _format_seconds(step.total)])
    machine = step.machine
    return (
        f"{table(rows)}\n"
        f"Assumed: {machine.flops / 1e12:.0f} TFLOP/s at an MFU of {machine.mfu:.0%}, memory of "
        f"{machine.hbm / 1e12:.2f} TB/s used to {machine.hbm_share:.0%}, links of "
        f"{machine.link / 1e9:.0f} GB/s within a machine of {machine.gpus} GPUs and "
        f"{machine.network / 1e9:.0f} GB/s between machines, used to {machine.link_share:.0%}."
    )


def _format_seconds(value: float) -> str:
    return f"{value:.3g}" if value else "0"


def plan_run(argv: list[str], machine: Machine) -> tuple[Plan, StepTime]:
    """Return the memory plan of a run, and the time of its steps.

    Args:
        argv: options of `trl memory-plan`.
        machine: its number of GPUs is replaced by the one in the options.
    """
    method_parser = argparse.ArgumentParser(add_help=False)
    method_parser.add_argument("--method", default="rloo")
    parser = make_parser(method_parser.parse_known_args(argv)[0].method)
    arguments = split_arguments(parser, argv)
    values = parser.read(arguments.script_argv).values
    launcher_options = launch_options(arguments.launcher_argv)
    plan = plan_of(parser, values, launcher_options)
    gpus = launcher_options["num_processes"] // launcher_options["num_machines"]
    machine = machine.replace(gpus=max(1, gpus))
    uses_vllm = str(values.get("use_vllm", False)).lower() == "true"
    parallel = int(values.get("vllm_tensor_parallel_size", 1)) if uses_vllm else 1
    return plan, StepTime(plan.model, plan.run, machine, parallel)


def as_text(plan: Plan, step: StepTime) -> str:
    """Render the plan and the time of a run, as the command prints them."""
    return f"{render(plan)}\n\n{render_time(step)}"


def main(argv: list[str] | None = None) -> None:
    """Print the plan and the time of a run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", choices=tuple(MACHINES), required=True)
    parser.add_argument("--hardware", type=json.loads, default={}, help="other figures (JSON)")
    options, plan_argv = parser.parse_known_args(argv)
    machine = MACHINES[options.gpu].replace(**options.hardware)
    plan, step = plan_run(plan_argv, machine)
    print(as_text(plan, step))


if __name__ == "__main__":
    main()
