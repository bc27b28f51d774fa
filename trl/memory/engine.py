"""How much memory a generation engine on the device of the training process may have."""

from __future__ import annotations

from dataclasses import dataclass

from .estimate import Estimate
from .meter import DeviceMemory
from .plan import HEADROOM, Plan, size

SMALLEST_CACHE = 16 * 2**20
BATCHED_TOKENS = 4096  # that one step of the engine computes
BLOCK = 32  # tokens; an engine gives out its cache in blocks


@dataclass(frozen=True)
class EngineMemory:
    """What an engine is given."""

    cache: int  # bytes for keys and values
    context: int  # most tokens of one prompt with its completion that they hold
    total: float  # bytes with weights and working memory


@dataclass(frozen=True)
class Engine:
    """An engine beside training; sizes are bytes of one rank."""

    plan: Plan  # of the training run; an engine that it counts is left out here
    ranks: int  # that divide its weights and its cache among them
    context: int  # most tokens of one prompt with its completion
    rows: int  # completions that decode together
    sleeps: bool  # it gives its memory back outside generation

    @property
    def weights(self) -> float:
        """Its own copy; an adapter is merged, or kept apart with room for as much again."""
        model = self.plan.model
        return self.plan.run.product_bytes * (model.parameters + model.adapter) / self.ranks

    @property
    def token(self) -> float:
        """Keys and values of one token in all layers."""
        model = self.plan.model
        return 2 * self.plan.run.product_bytes * model.keys * model.layers / self.ranks

    @property
    def working(self) -> float:
        """Activations of one step, and logits in float32 with what sampling adds."""
        model = self.plan.model
        activations = BATCHED_TOKENS * (4 * model.hidden + 3 * model.intermediate)
        return self.plan.run.product_bytes * activations + 4 * 3 * self.rows * model.vocabulary

    def memory(self, shortest: int, measured: DeviceMemory | None = None) -> EngineMemory:
        """Divide what training leaves of the device between the weights and the cache.

        An engine that sleeps shares the device with what is held while nothing is computed; one
        that does not, with the largest phase. Where less is free than the plan assumes, because
        other processes use the device or this one holds more than planned, what is `measured` of
        the device now, before the engine is started, counts. A context of fewer than `shortest`
        tokens is a ValueError, in numbers.
        """
        plan = self.plan
        run = plan.run.replace(engine_bytes=0.0, engine_sleeps=self.sleeps)
        phases = Estimate(plan.model, run).totals
        phase = "generation" if self.sleeps else max(phases, key=phases.__getitem__)
        budget, taken, seen = plan.budget, phases[phase], ""
        if measured is not None:
            budget = min(budget, (1 - HEADROOM) * (measured.free + measured.held))
            taken = max(taken, measured.held)
            seen = (
                f" ({size(measured.free)} of the device's {size(plan.device_bytes)} are free now, "
                f"and training holds {size(measured.held)})"
            )
        fixed = self.weights + self.working
        left = budget - taken - fixed
        context = min(self.context, int(left // self.token))
        if context < shortest:
            advice = "Lower max_completion_length"
            advice = advice if self.sleeps else "Set vllm_enable_sleep_mode=True"
            raise ValueError(
                f"The vLLM engine does not fit beside training. Of {size(budget)} that may be "
                f"filled{seen}, {phase} takes {size(taken)} and the engine itself {size(fixed)}; a "
                f"prompt with its completion needs {size(shortest * self.token)} more. {advice}, "
                "or spread the engine over ranks with vllm_tensor_parallel_size, or set "
                "vllm_gpu_memory_utilization to try it anyway."
            )
        blocks = -(-min(self.context, run.prompt + run.completion) // BLOCK)
        # More cache than a round fills would be idle.
        wanted = self.token * max(self.rows * blocks * BLOCK, context)
        cache = max(SMALLEST_CACHE, min(wanted, left))
        return EngineMemory(int(cache), context, fixed + cache)
