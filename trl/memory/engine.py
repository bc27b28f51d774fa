"""How much memory a generation engine on the device of the training process may have."""

from __future__ import annotations

from dataclasses import dataclass

from .estimate import Estimate
from .plan import HEADROOM, Plan
from .probes import DeviceMemory

SMALLEST_CACHE = 16 * 2**20
BATCHED_TOKENS = 4096  # that one step of the engine computes


@dataclass(frozen=True)
class EngineNeeds:
    """What an engine holds, in bytes of one rank."""

    weights: float  # its own copy
    token: float  # keys and values of one token in all layers
    tokens: int  # of all prompts and completions of a round; more cache would be idle
    context: int  # most tokens of one prompt with its completion
    entry: int  # bytes of a number
    rows: int  # completions that decode together


@dataclass(frozen=True)
class EngineMemory:
    """What an engine is given."""

    cache: int  # bytes for keys and values
    context: int  # most tokens of one prompt with its completion that they hold
    total: float  # bytes with weights and working memory


def engine_memory(
    plan: Plan,
    needs: EngineNeeds,
    sleeps: bool,
    shortest: int,
    measured: DeviceMemory | None = None,
) -> EngineMemory:
    """Divide what training leaves of the device between the weights and the cache of an engine.

    An engine that sleeps shares the device with what is held while nothing is computed; one that
    does not, with the largest phase. Where less is free than the plan assumes, because other
    processes use the device or this one holds more than planned, what is measured counts.

    Args:
        plan (`Plan`): of the run, whose engine is counted as empty here.
        needs (`EngineNeeds`): what the engine holds.
        sleeps (`bool`): whether it gives its memory back outside generation.
        shortest (`int`): fewest tokens that a context must have.
        measured (`DeviceMemory`, *optional*): of the device now, before the engine is started.

    Raises:
        ValueError: if not one prompt with its completion fits, in numbers.
    """
    run = plan.run.replace(engine_bytes=0.0, engine_sleeps=sleeps)
    phases = Estimate(plan.model, run).totals
    phase = "generation" if sleeps else max(phases, key=phases.__getitem__)
    budget, taken, seen = plan.budget, phases[phase], ""
    if measured is not None:
        budget = min(budget, (1 - HEADROOM) * measured.reachable)
        taken = max(taken, measured.held)
        seen = (
            f" ({_gb(measured.free)} of the device's {_gb(plan.device_bytes)} are free now, and "
            f"training holds {_gb(measured.held)})"
        )
    fixed = needs.weights + working_bytes(plan, needs)
    left = budget - taken - fixed
    context = min(needs.context, int(left // needs.token))
    if context < shortest:
        advice = "Lower max_completion_length" if sleeps else "Set vllm_enable_sleep_mode=True"
        raise ValueError(
            f"The vLLM engine does not fit beside training. Of {_gb(budget)} that may be "
            f"filled{seen}, {phase} takes {_gb(taken)} and the engine itself {_gb(fixed)}; a "
            f"prompt with its completion needs {_gb(shortest * needs.token)} more. {advice}, or "
            "spread the engine over ranks with vllm_tensor_parallel_size, or set "
            "vllm_gpu_memory_utilization to try it anyway."
        )
    cache = max(SMALLEST_CACHE, needs.token * max(needs.tokens, context))
    cache = min(cache, max(left, SMALLEST_CACHE))
    return EngineMemory(int(cache), context, fixed + cache)


def working_bytes(plan: Plan, needs: EngineNeeds) -> float:
    """Activations of one step of the engine, and logits in float32 with what sampling adds."""
    model = plan.model
    activations = needs.entry * BATCHED_TOKENS * (4 * model.hidden + 3 * model.intermediate)
    return activations + 4 * 3 * needs.rows * model.vocabulary


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
