"""Completions that are more than one turn of the policy: tools, and rollout functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...data.formats import is_conversational
from ...distributed import Ranks
from ...generation.base import GenerationBackend
from ...models.loading import context_length
from ...models.policy_handle import PolicyHandle
from .online_config import OnlineConfig

if TYPE_CHECKING:
    from ...generation.function_backend import RolloutFunction
    from ...generation.tools.runner import ToolRunner


@dataclass(frozen=True)
class Agents:
    """What a trainer was given besides an engine."""

    tools: ToolRunner | None = None
    rollout_func: RolloutFunction | None = None

    @classmethod
    def of(
        cls,
        args: OnlineConfig,
        tools: Sequence[Callable[..., Any]] | None,
        rollout_func: RolloutFunction | None,
        environment_factory: Any,
    ) -> Agents:
        """Check the arguments of a trainer, before anything is loaded.

        Raises:
            NotImplementedError: for an environment factory.
            TypeError: if a tool or the rollout function cannot be called.
            ValueError: if a tool has no schema, or tools and a rollout function are given.
        """
        if environment_factory is not None:
            raise NotImplementedError(
                "environment_factory is not available in this release: pass functions as tools, or "
                "run the environments in a rollout_func."
            )
        if rollout_func is None:
            return cls(tools=_runner(tools, args) if tools else None)
        if not callable(rollout_func):
            raise TypeError(f"rollout_func must be a function, not {rollout_func!r:.80}.")
        if tools:
            raise ValueError(
                "tools cannot be used with rollout_func, which makes the completions itself; call "
                "the tools inside it."
            )
        return cls(rollout_func=rollout_func)

    def template_kwargs(self, args: OnlineConfig) -> dict[str, Any]:
        """Arguments of the chat template, which describes the tools in the prompt."""
        given: Any = args.chat_template_kwargs or {}
        return given if self.tools is None else given | {"tools": self.tools.schemas}

    def check_prompts(self, dataset: Any) -> None:
        """Refuse prompts in which the chat template cannot describe the tools.

        Raises:
            ValueError: if the first row's prompt is not a list of messages.
        """
        if self.tools is None:
            return
        prompt = next(iter(dataset))["prompt"]
        if not is_conversational({"prompt": prompt}):
            raise ValueError(
                "tools need conversational prompts, lists of messages with 'role' and 'content', "
                f"for the chat template to describe the tools; the first row has {prompt!r:.80}."
            )

    def with_tools(
        self,
        engine: GenerationBackend,
        policy: PolicyHandle,
        args: OnlineConfig,
        stop_ids: tuple[int, ...],
    ) -> GenerationBackend:
        """Answer tool calls between the turns that an engine generates, if there are tools.

        Raises:
            ValueError: if the chat template has no place for tools.
        """
        if self.tools is None:
            return engine
        from ...data.tool_template import ToolTurns
        from ...generation.tools.calls import CallParser
        from ...generation.tools.loop import ToolLoop

        tokenizer = policy.tokenizer
        turns = ToolTurns(tokenizer, stop_ids, self.template_kwargs(args))
        contexts = (engine.context, context_length(policy.model))
        bounds = [context for context in contexts if context is not None]
        options: Any = args.chat_template_kwargs
        return ToolLoop(
            engine,
            self.tools,
            CallParser(tokenizer, self.tools.schemas, options),
            turns,
            policy.ranks,
            args.max_tool_calling_iterations,
            min(bounds, default=None),
        )


def _runner(tools: Sequence[Callable[..., Any]], args: OnlineConfig) -> ToolRunner:
    from ...generation.tools.runner import ToolRunner  # most runs have no tools

    return ToolRunner(tools, args.tool_timeout)


def function_engine(
    function: Callable[[list[Any]], Mapping[str, Any]], engine: GenerationBackend, ranks: Ranks
) -> GenerationBackend:
    """Let a function make the completions; see `FunctionBackend`."""
    from ...generation.function_backend import FunctionBackend

    return FunctionBackend(function, engine, ranks)
