"""The memory of a generation engine on the training device."""

from dataclasses import dataclass

from ..number_format import format_bytes
from .estimate import Estimate
from .meter import DeviceMemory
from .plan import HEADROOM, Plan

SMALLEST_CACHE = 16 * 2**20  # bytes
BATCHED_TOKENS = 4096  # tokens in one step of an engine
BLOCK = 32  # tokens; an engine allocates its cache in blocks


@dataclass(frozen=True)
class EngineMemory:
    """The memory assigned to an engine."""

    cache: int  # bytes of the key-value cache
    context: int  # maximum tokens of a prompt with its completion in the cache
    total: float  # bytes, with weights and working memory


@dataclass(frozen=True)
class Engine:
    """A generation engine on the training device; sizes are bytes of one rank."""

    plan: Plan  # of the training run; the memory it assumes for an engine is ignored
    ranks: int  # that shard the engine's weights and cache
    context: int  # maximum tokens of a prompt with its completion
    rows: int  # completions that decode together
    sleeps: bool  # the engine frees its memory outside generation

    @property
    def weights(self) -> float:
        """The engine's copy of the weights.

        An adapter counts once more: it is merged, or separate with a buffer of the same size.
        """
        model = self.plan.model
        return self.plan.run.product_bytes * (model.parameters + model.adapter) / self.ranks

    @property
    def token(self) -> float:
        """Keys and values of one token in all layers."""
        model = self.plan.model
        return 2 * self.plan.run.product_bytes * model.keys * model.layers / self.ranks

    @property
    def working(self) -> float:
        """Activations of one step, and float32 logits with two copies for sampling."""
        model = self.plan.model
        activations = BATCHED_TOKENS * (4 * model.hidden + 3 * model.intermediate)
        return self.plan.run.product_bytes * activations + 4 * 3 * self.rows * model.vocabulary

    def memory(self, shortest: int, measured: DeviceMemory | None = None) -> EngineMemory:
        """Assign the memory that training leaves on the device.

        An engine that sleeps shares the device only with the training memory during generation,
        otherwise with that of the largest phase. `measured` is the device before the engine starts;
        it is used if less is free than planned. Raises a ValueError if the context would be shorter
        than `shortest` tokens.
        """
        plan = self.plan
        run = plan.run.replace(engine_bytes=0.0, engine_sleeps=self.sleeps)
        phases = Estimate(plan.model, run).totals
        phase = "generation" if self.sleeps else max(phases, key=phases.__getitem__)
        budget = plan.budget
        training = phases[phase]
        measurement = ""
        if measured is not None:
            budget = min(budget, (1 - HEADROOM) * (measured.free + measured.used))
            training = max(training, measured.used)
            measurement = (
                f" ({format_bytes(measured.free)} of the device's "
                f"{format_bytes(plan.device_bytes)} are free now, and training holds "
                f"{format_bytes(measured.used)})"
            )
        fixed = self.weights + self.working
        left = budget - training - fixed
        context = min(self.context, int(left // self.token))
        if context < shortest:
            advice = "Set vllm_enable_sleep_mode=True"
            if self.sleeps:
                advice = "Lower max_completion_length"
            raise ValueError(
                f"The vLLM engine does not fit beside training. Of {format_bytes(budget)} that "
                f"may be filled{measurement}, {phase} takes {format_bytes(training)} and the "
                f"engine itself {format_bytes(fixed)}; a prompt with its completion needs "
                f"{format_bytes(shortest * self.token)} more. {advice}, or "
                "spread the engine over ranks with vllm_tensor_parallel_size, or set "
                "vllm_gpu_memory_utilization to try it anyway."
            )
        blocks = -(-min(self.context, run.prompt + run.completion) // BLOCK)
        # More cache than a rollout batch fills would be unused.
        wanted = self.token * max(self.rows * blocks * BLOCK, context)
        cache = max(SMALLEST_CACHE, min(wanted, left))
        return EngineMemory(int(cache), context, fixed + cache)
