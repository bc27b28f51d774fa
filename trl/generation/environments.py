"""Environments: objects with state whose public methods the policy calls as tools."""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..distributed import Ranks
from ..json_files import without_surrogates
from ..suggestions import did_you_mean
from ..timed_calls import copy_containers
from ..types import Prompts
from .base import BackendWrapper, Generations, Sampling
from .tools.calls import tool_schema

# The dataset column with the name of a row's environment, if there are several.
NAME_COLUMN = "environment"
# Public methods that are no tools.
NOT_TOOLS = ("reset", "get_reward")


class Environment(Protocol):
    """An object of a user's class. It may have tools and a method `get_reward`, too."""

    def reset(self, **columns: Any) -> str | list[Any] | None:
        """Begin an episode with the columns of a row; return what the policy is shown."""


Factory = Callable[[], Environment]


class Environments:
    """The environments of a run. Each row of a rollout batch has its own; later batches reuse it.

    `factories` is a callable without arguments that makes an environment, or a mapping of several
    by name. With a mapping, the dataset column `environment` names the one of each row. Each
    factory is called once in the constructor, and again when a batch needs more environments.
    Rows can call the functions in `tools` besides the methods of their environments.
    """

    def __init__(
        self, factories: Factory | Mapping[str, Factory], tools: Sequence[Callable[..., Any]] = ()
    ):
        self._is_single = not isinstance(factories, Mapping)
        self._factories: dict[Any, Factory] = (
            dict(factories) if isinstance(factories, Mapping) else {None: factories}
        )
        if not self._factories:
            raise ValueError("environment_factory is empty: give at least one environment.")
        self._shared_tools = {tool_schema(tool)["function"]["name"]: tool for tool in tools}
        self._pools = {
            name: [_make_environment(factory)] for name, factory in self._factories.items()
        }
        self._schemas = {
            name: [tool_schema(tool) for tool in self.tools_of(pool[0]).values()]
            for name, pool in self._pools.items()
        }

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """All functions that some row may call, one for each name."""
        tools_by_name: dict[str, Callable[..., Any]] = {}
        for pool in self._pools.values():
            tools_by_name.update(self.tools_of(pool[0]))
        return list(tools_by_name.values())

    @property
    def reward_functions(self) -> list[Callable[..., Any]]:
        """One for each class with `get_reward`. It returns None for rows of other classes."""
        classes = dict.fromkeys(type(pool[0]) for pool in self._pools.values())
        return [_reward_function(cls) for cls in classes if hasattr(cls, "get_reward")]

    def tools_of(self, environment: Environment) -> dict[str, Callable[..., Any]]:
        """Return the tools of a row by name: public methods win over the shared functions."""
        names = [
            name
            for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
            if not name.startswith("_") and name not in NOT_TOOLS
        ]
        return self._shared_tools | {name: getattr(environment, name) for name in names}

    def reset_for_rows(
        self, rows: Sequence[dict[str, Any]]
    ) -> tuple[list[Environment], list[dict[str, Any]]]:
        """Reset an environment for each row of the dataset.

        Returns the environments and copies of the rows, both in the order of `rows`. In the copies
        the prompt ends with what `reset` returned, and the chat template gets the row's tools.
        """
        used: Counter[str | None] = Counter()  # environments of each pool that rows have taken
        environments = []
        prepared_rows = []
        for index, row in enumerate(rows):
            name = self._environment_name(row, index)
            pool = self._pools[name]
            if used[name] == len(pool):
                pool.append(_make_environment(self._factories[name]))
            environment = pool[used[name]]
            used[name] += 1
            columns = {
                key: value for key, value in row.items() if self._is_single or key != NAME_COLUMN
            }
            observation = environment.reset(**copy_containers(columns))
            template_kwargs = dict(row.get("chat_template_kwargs") or {})
            template_kwargs["tools"] = self._schemas[name] or None
            environments.append(environment)
            prepared_rows.append(
                row
                | {
                    "prompt": _append_observation(row["prompt"], observation, type(environment)),
                    "chat_template_kwargs": template_kwargs,
                }
            )
        return environments, prepared_rows

    def _environment_name(self, row: dict[str, Any], index: int) -> str | None:
        """Return the key of the row's environment in `_pools`."""
        name = None if self._is_single else row.get(NAME_COLUMN)
        if name not in self._pools:
            legal = [str(key) for key in self._pools]
            hint = did_you_mean(str(name), legal, f" Choose from {', '.join(legal)}.")
            raise ValueError(
                f"Row {index} of the batch has {NAME_COLUMN}={name!r}, which names no "
                f"environment.{hint}"
            )
        return name


@dataclasses.dataclass(eq=False)
class EnvironmentBackend(BackendWrapper):
    """Resets an environment for each row, and lets another backend complete the new prompt."""

    environments: Environments
    encode: Callable[[Sequence[dict[str, Any]]], Prompts]  # tokenizes rows of the dataset
    ranks: Ranks

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row of `prompts.rows` in its environment; see `GenerationBackend`."""
        with self.ranks.fail_together("environments"):
            environments, rows = self.environments.reset_for_rows(prompts.rows or [])
            new_prompts = self.encode(rows)
            tools = [self.environments.tools_of(environment) for environment in environments]
        generations = self.engine.generate(
            dataclasses.replace(new_prompts, tools=tools), sampling, group_size
        )
        columns = [
            {"environments": environment, "prompt": messages}
            for environment, messages in zip(environments, new_prompts.messages, strict=True)
        ]
        return dataclasses.replace(
            generations, prompt_ids=new_prompts.token_ids, extra_columns=columns
        )


def _make_environment(factory: Factory) -> Environment:
    if not callable(factory):
        raise TypeError(
            f"environment_factory: {factory!r:.80} cannot be called; give a class, or a function "
            "without arguments that makes an environment."
        )
    environment = factory()
    if not callable(getattr(type(environment), "reset", None)):
        raise ValueError(
            f"environment_factory: {type(environment).__name__} has no method 'reset', which "
            "begins an episode with the columns of a row."
        )
    return environment


def _append_observation(
    prompt: str | list[dict[str, Any]], observation: object, environment_class: type
) -> str | list[dict[str, Any]]:
    """Return the prompt with what `reset` returned at the end of its last message."""
    if observation is None:
        return prompt
    if not isinstance(observation, (str, list)):
        raise TypeError(
            f"{environment_class.__name__}.reset returned {observation!r:.80}; it must return "
            "None, text, or a list of content blocks."
        )
    text_or_blocks: str | list[Any] = without_surrogates(observation)
    if isinstance(prompt, str):
        raise TypeError(
            f"{environment_class.__name__}.reset returned {text_or_blocks!r:.80}, but the prompt "
            "is text: an observation can only be added to a list of messages."
        )
    content = prompt[-1]["content"]
    if isinstance(content, str) and isinstance(text_or_blocks, str):
        content += text_or_blocks
    else:
        content = _content_blocks(content) + _content_blocks(text_or_blocks)
    return [*prompt[:-1], prompt[-1] | {"content": content}]


def _content_blocks(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _reward_function(cls: Any) -> Callable[..., Any]:
    """Return a reward function, named after the class, that calls `get_reward` of its instances."""

    def reward(environments: Sequence[Any], **columns: object) -> list[Any]:
        return [
            environment.get_reward() if type(environment) is cls else None
            for environment in environments
        ]

    async def async_reward(environments: Sequence[Any], **columns: object) -> list[Any]:
        return [
            await environment.get_reward() if type(environment) is cls else None
            for environment in environments
        ]

    function = async_reward if inspect.iscoroutinefunction(cls.get_reward) else reward
    function.__name__ = cls.__name__
    return function
