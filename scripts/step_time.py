"""How long a training step should take, from floating-point operations and bytes moved.

    python scripts/step_time.py --gpu h100 --config examples/cli_configs/rloo_7b_8_gpus.yaml

takes the options of `trl memory-plan` behind its own and prints that plan with the seconds of each
phase. It is meant for comparing settings, and for planning a run before the machines are there.
What no term covers (launches of small kernels, reward functions, waiting for the longest completion
of other ranks) makes a real step longer. Sources:

- operations: Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1 (2 N a
  token forward, 4 N backward), and Chowdhery et al., "PaLM", 2022, appendix B (attention);
- bytes of ZeRO: Rajbhandari et al., "ZeRO", 2020, section 7 (a ring moves (R-1)/R of the data);
- decoding: Pope et al., "Efficiently Scaling Transformer Inference", 2022, section 2 (weights and
  cache are read once a token).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields, replace
from typing import Any

from trl.cli.launch import launch_options, split_arguments
from trl.cli.memory_plan import make_parser, plan_of
from trl.memory.estimate import Estimate
from trl.memory.model_size import FLOAT32, ModelSize
from trl.memory.plan import Plan, render, table
from trl.memory.rank_memory import RankMemory
from trl.memory.settings import RunSettings


@dataclass(frozen=True)
class Machine:
    """What a GPU and its surroundings can do; bandwidths are bytes a second in one direction.

    Args:
        flops (`float`): dense bfloat16 operations a second, at most.
        mfu (`float`): the share of them that training and prefilling reach.
        hbm (`float`): bandwidth of the GPU's memory.
        hbm_share (`float`): the share of it that decoding and updates reach.
        link (`float`): bandwidth to GPUs of the same machine.
        network (`float`): bandwidth of one GPU to other machines.
        link_share (`float`): the share of both that collectives reach.
        host (`float`): bandwidth to the memory of the host, and of an update there.
        gpus (`int`): of one machine.
    """

    flops: float
    hbm: float
    link: float
    network: float
    mfu: float = 0.4
    hbm_share: float = 0.6
    link_share: float = 0.7
    host: float = 25e9
    gpus: int = 8

    def replace(self, **changes: Any) -> Machine:
        """Return a copy with figures changed.

        Raises:
            ValueError: for a figure of another name, or one that is not above 0.
        """
        known = {field.name for field in fields(self)}
        for name, value in changes.items():
            if name not in known:
                raise ValueError(f"hardware: {name} is none of {', '.join(sorted(known))}.")
            if not value > 0:
                raise ValueError(f"hardware: {name}={value} must be above 0.")
        return replace(self, **changes)

    def ring(self, count: float, ranks: int, across: bool = False) -> float:
        """Seconds in which `count` bytes are gathered from, or reduced and scattered to, ranks.

        Args:
            count (`float`): bytes of all ranks together.
            ranks (`int`): in the ring.
            across (`bool`): each is on another machine.
        """
        slowest = self.network if across or ranks > self.gpus else self.link
        return count * (ranks - 1) / ranks / (slowest * self.link_share)


# NVIDIA's data sheets; NVLink in one direction; 200 and 400 Gb/s of InfiniBand for each GPU.
MACHINES = {
    "a100": Machine(flops=312e12, hbm=2.039e12, link=300e9, network=25e9),
    "h100": Machine(flops=989e12, hbm=3.35e12, link=450e9, network=50e9),
    "h200": Machine(flops=989e12, hbm=4.8e12, link=450e9, network=50e9),
}


@dataclass(frozen=True)
class Seconds:
    """A phase of a step.

    Args:
        compute (`float`): operations.
        memory (`float`): reading and writing the GPU's memory, or the host's.
        communication (`float`): between GPUs.
        overlaps (`bool`): communication goes on during the other two.
    """

    compute: float = 0.0
    memory: float = 0.0
    communication: float = 0.0
    overlaps: bool = False

    @property
    def total(self) -> float:
        """Seconds of the phase: operations hide the reads that feed them, or the reverse."""
        busy = max(self.compute, self.memory)
        return max(busy, self.communication) if self.overlaps else busy + self.communication


@dataclass(frozen=True)
class StepTime:
    """Time of one update.

    Args:
        model (`ModelSize`): what is trained.
        run (`RunSettings`): how.
        machine (`Machine`): on what.
        parallel (`int`): GPUs over which a generation engine divides the weights.
    """

    model: ModelSize
    run: RunSettings
    machine: Machine
    parallel: int = 1

    @property
    def phases(self) -> dict[str, Seconds]:
        """Seconds of each phase of one update."""
        found = {"prefill": self.prefill(), "decoding": self.decoding()}
        if self.run.reference or self.run.scores_policy:
            found["scoring"] = self.scoring()
        return found | {"forward + backward": self.training(), "optimizer": self.update()}

    @property
    def total(self) -> float:
        """Seconds of one update."""
        return sum(phase.total for phase in self.phases.values())

    # --- Counts ---

    @property
    def rounds(self) -> float:
        """Rounds that are generated for one update."""
        return self.run.accumulation / (self.run.slices * self.run.passes)

    @property
    def _tokens(self) -> int:
        """Tokens of the forward of one micro-batch."""
        return sum(self.run.forward_passes(cuts=False))

    def _operations(self, tokens: float) -> float:
        """Of one forward: 2 for each weight a token meets, 4 for each pair that attends."""
        model, run = self.model, self.run
        met = model.parameters - (0 if model.tied else model.head)  # looking a token up is free
        seen = run.prompt + run.completion / 2
        return tokens * (2 * met + 4 * model.queries * model.layers * seen)

    def _compute(self, operations: float) -> float:
        return operations / (self.machine.flops * self.machine.mfu)

    def _read(self, count: float) -> float:
        return count / (self.machine.hbm * self.machine.hbm_share)

    @property
    def _whole(self) -> float:
        """Seconds in which all weights are gathered from their shards."""
        run = self.run
        each = run.weight_bytes if run.matrix_bytes is None else run.matrix_bytes
        count = each * self.model.parameters
        if not run.sharding.divides_weights:
            return 0.0
        return self.machine.ring(count, run.sharding.ranks)

    # --- Phases ---

    def prefill(self) -> Seconds:
        """The prompts of a round, all their tokens at once; weights from shards are gathered."""
        rows, prompts = self._in_flight
        tokens = self.run.rows / rows * prompts * self.run.prompt
        return Seconds(
            compute=self.rounds * self._compute(self._operations(tokens)),
            communication=self.rounds * self._whole,
        )

    def decoding(self) -> Seconds:
        """One token of every row at a time, each as long as reading weights and cache takes."""
        run = self.run
        rows, prompts = self._in_flight
        steps = self.rounds * -(-run.rows // rows) * run.completion
        token = Estimate(self.model, run).layer.cache * self.model.layers
        cache = token * (prompts * run.prompt + rows * run.completion / 2)
        weights = run.product_bytes * self.model.parameters / self.parallel
        # From shards that are gathered layer by layer, every token moves all weights.
        layerwise = not (run.gathers or self._is_engine)
        return Seconds(
            compute=self._compute(steps * self._operations(rows)),
            memory=steps * self._read(weights + cache),
            communication=steps * self._whole if layerwise else 0.0,
        )

    @property
    def _in_flight(self) -> tuple[int, int]:
        """Rows that decode together, and prompts that they read; an engine takes all."""
        run = self.run
        if self._is_engine:
            return run.rows, run.groups(run.rows)
        return Estimate(self.model, run).in_flight()

    @property
    def _is_engine(self) -> bool:
        return self.run.engine_bytes is not None

    def scoring(self) -> Seconds:
        """Forwards of the policy and of the reference over each round."""
        forwards = self.run.reference + self.run.scores_policy
        count = forwards * self.run.slices * self.rounds
        return Seconds(
            compute=count * self._compute(self._operations(self._tokens)),
            communication=count * self._whole,
            overlaps=True,
        )

    def training(self) -> Seconds:
        """Forward, backward (twice that), and with checkpointing the forward again."""
        run = self.run
        # The gradients of frozen weights are not computed: a third of forward and backward.
        times = (2 if self.model.frozen else 3) + run.gradient_checkpointing
        operations = run.accumulation * times * self._operations(self._tokens)
        return Seconds(
            compute=self._compute(operations),
            communication=run.accumulation * self._gathers * self._whole + self._reducing,
            overlaps=True,
        )

    @property
    def _gathers(self) -> int:
        """For the forward, and again for the backward pass unless the weights stay."""
        return 1 if self.run.sharding.keeps_weights else 2

    @property
    def _reducing(self) -> float:
        """Seconds in which the gradients of an update are summed over the ranks."""
        run, sharding = self.run, self.run.sharding
        count = RankMemory(self.model, run).trained * self.model.trainable
        if not sharding.stage:
            return 2 * self.machine.ring(count, run.processes)  # reduced, then gathered
        each_time = sharding.syncs and sharding.stage > 1
        return (run.accumulation if each_time else 1) * self._divided(count)

    def _divided(self, count: float) -> float:
        """Reduced among the ranks of a copy, then each share among the copies."""
        ranks = self.run.sharding.ranks
        copies = self.run.processes // ranks
        among = self.machine.ring(count / ranks, copies, across=True)
        return self.machine.ring(count, ranks) + 2 * among

    def update(self) -> Seconds:
        """States, weights and gradients are read and written once; ZeRO-1 and 2 then gather."""
        run, sharding = self.run, self.run.sharding
        rank = RankMemory(self.model, run)
        share = sharding.fraction(1) * self.model.trainable
        moved = 2 * rank.optimizer + (FLOAT32 + run.weight_bytes) * share
        seconds = moved / self.machine.host if sharding.offloads_optimizer else self._read(moved)
        gathers = sharding.is_zero and 0 < sharding.stage < 3
        weights = run.weight_bytes * self.model.trainable
        ring = self.machine.ring(weights, sharding.ranks) if gathers else 0.0
        return Seconds(memory=seconds, communication=ring)


def render_time(step: StepTime) -> str:
    """Write the times as a table of plain text, with what was assumed."""
    rows = [["predicted seconds of", "compute", "memory", "communication", "total"]]
    for name, phase in step.phases.items():
        parts = (phase.compute, phase.memory, phase.communication, phase.total)
        rows.append([name, *map(_seconds, parts)])
    rows.append(["an update", "", "", "", _seconds(step.total)])
    machine = step.machine
    return (
        f"{table(rows)}\n"
        f"Assumed: {machine.flops / 1e12:.0f} TFLOP/s at an MFU of {machine.mfu:.0%}, memory of "
        f"{machine.hbm / 1e12:.2f} TB/s used to {machine.hbm_share:.0%}, links of "
        f"{machine.link / 1e9:.0f} GB/s within a machine of {machine.gpus} GPUs and "
        f"{machine.network / 1e9:.0f} GB/s between machines, used to {machine.link_share:.0%}."
    )


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value else "0"


def planned(words: list[str], machine: Machine) -> tuple[Plan, StepTime]:
    """The plan of a run, and the time of its steps.

    Args:
        words: options of `trl memory-plan`.
        machine (`Machine`): what it runs on; the number of its GPUs follows from the options.
    """
    method = argparse.ArgumentParser(add_help=False)
    method.add_argument("--method", default="rloo")
    parser = make_parser(method.parse_known_args(words)[0].method)
    arguments = split_arguments(parser, words)
    values = parser.read(arguments.script_argv).values
    launched = launch_options(arguments.launcher_argv)
    found = plan_of(parser, values, launched)
    machine = machine.replace(gpus=max(1, launched["num_processes"] // launched["num_machines"]))
    is_divided = str(values.get("use_vllm", False)).lower() == "true"
    parallel = int(values.get("vllm_tensor_parallel_size", 1)) if is_divided else 1
    return found, StepTime(found.model, found.run, machine, parallel)


def text(found: Plan, step: StepTime) -> str:
    """What the command prints."""
    return f"{render(found)}\n\n{render_time(step)}"


def main(words: list[str] | None = None) -> None:
    """Print the plan and the time of a run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", choices=tuple(MACHINES), required=True)
    parser.add_argument("--hardware", type=json.loads, default={}, help="other figures (JSON)")
    own, rest = parser.parse_known_args(words)
    print(text(*planned(rest, MACHINES[own.gpu].replace(**own.hardware))))


if __name__ == "__main__":
    main()
