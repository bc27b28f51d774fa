"""What a trainer is given besides an engine: tools, environments, and functions that generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from ...data.formats import is_conversational
from ...models.loading import context_length, model_bounds
from ...types import EnvironmentFactory, Prompts, RolloutFunc
from ..base.policy import EvalDataset, TrainDataset
from .online_config import OnlineConfig
from .online_setup import check_datasets

if TYPE_CHECKING:
    from ...generation.base import GenerationBackend, PolicyHandle
    from ...generation.environments import Environments
    from ...generation.tools.calls import ToolRunner

Tools = Sequence[Callable[..., Any]] | None

# Tools and environments are imported where they are made: few runs use them.


class Agents:
    """What a trainer was given besides an engine, checked before anything is loaded."""

    def __init__(
        self,
        args: OnlineConfig,
        tools: Tools,
        rollout: RolloutFunc | None,
        factory: EnvironmentFactory | None,
    ):
        self.args, self.rollout_func = args, rollout
        self.tools: ToolRunner | None = None
        self.environments: Environments | None = None
        self.rewards: list[Callable[..., Any]] = []  # that ask the environments
        if args.use_vllm:
            from ...generation.vllm.factory import check_options

            check_options(args)
        if rollout is not None:
            if not callable(rollout):
                raise TypeError(f"rollout_func must be a function, not {rollout!r:.80}.")
            others = {"tools": tools, "environment_factory": factory}
            for name in [name for name, given in others.items() if given]:
                raise ValueError(
                    f"{name} cannot be used with rollout_func, which makes the completions itself; "
                    "use them inside it."
                )
        if factory is not None:
            from ...generation.environments import Environments

            self.environments = Environments(factory, tools or ())
            self.rewards, tools = self.environments.reward_functions, self.environments.tools
        if tools:
            from ...generation.tools.calls import ToolRunner

            self.tools = ToolRunner(tools, args.tool_timeout)

    def checked_dataset(self, train: TrainDataset | None, evaluation: EvalDataset) -> TrainDataset:
        """Check the datasets, see `check_datasets`, and return that of training."""
        # Environments that bring their data need none.
        if train is None and self.environments is not None and self.args.max_steps > 0:
            prompt: Any = [{"role": "user", "content": ""}]
            train = Dataset.from_dict({"prompt": [prompt] * (self.args.generation_batch_size or 1)})
        check_datasets(train, evaluation, self.args)
        if self.tools is not None and train is not None:
            prompt = next(iter(train))["prompt"]
            if not is_conversational({"prompt": prompt}):
                raise ValueError(
                    "tools need conversational prompts, lists of messages with 'role' and "
                    "'content', for the chat template to describe the tools; the first row has "
                    f"{prompt!r:.80}."
                )
        return train

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of the chat template, which describes the tools in the prompt."""
        given: Any = self.args.chat_template_kwargs or {}
        return given if self.tools is None else given | {"tools": self.tools.schemas}

    def around(
        self,
        engine: GenerationBackend,
        call: Callable[[list[Any]], Mapping[str, Any]] | None,
        policy: PolicyHandle,
        stop_ids: tuple[int, ...],
        encode: Callable[[Sequence[dict[str, Any]]], Prompts],
    ) -> GenerationBackend:
        """Let rows act in environments and answer tool calls, or a function use the engine."""
        if call is not None:
            from ...generation.function_backend import FunctionBackend

            return FunctionBackend(engine, call, policy.ranks, model_bounds(policy.model))
        if self.tools is not None:
            from ...generation.tools.calls import ToolCallParser
            from ...generation.tools.loop import ToolLoop
            from ...generation.tools.templates import ToolResultEncoder

            tokenizer: Any = policy.tokenizer
            bounds = [
                x for x in (engine.context_length, context_length(policy.model)) if x is not None
            ]
            options: Any = self.args.chat_template_kwargs
            # First, as it says so if the template does not know tools at all.
            result_encoder = ToolResultEncoder(tokenizer, stop_ids, self.template_kwargs)
            engine = ToolLoop(
                engine,
                tools=self.tools,
                parser=ToolCallParser(tokenizer, self.tools.schemas, options),
                result_encoder=result_encoder,
                ranks=policy.ranks,
                max_iterations=self.args.max_tool_calling_iterations,
                context_length=min(bounds, default=None),
            )
        if self.environments is None:
            return engine
        from ...generation.environments import EnvironmentBackend

        return EnvironmentBackend(engine, self.environments, encode, policy.ranks)
