"""Completions that act in environments: objects with a state, whose methods the policy calls."""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..distributed import Ranks
from ..json_files import without_surrogates
from ..suggestions import did_you_mean
from ..timed_calls import copy_containers
from ..types import Prompts
from .base import AroundEngine, Generations, Sampling
from .tools.calls import schema_of

CHOICE = "environment"  # the column that names a row's environment, where there are several
NO_TOOLS = ("reset", "get_reward")


class Environments:
    """The environments of a run. Each row of a round has its own; later rounds reset it.

    `factories` are a callable without arguments, or several by the name that a row's column
    `environment` gives; each is called once at first, and again when rows need more. All rows may
    call the `tools`, besides the methods of their environments.
    """

    def __init__(self, factories: Any, tools: Sequence[Callable[..., Any]] = ()):
        self._is_single = not isinstance(factories, Mapping)
        self._factories: dict[Any, Any] = {None: factories} if self._is_single else {**factories}
        if not self._factories:
            raise ValueError("environment_factory is empty: give at least one environment.")
        self._shared = {schema_of(tool)["function"]["name"]: tool for tool in tools}
        self._pools = {name: [_made(factory)] for name, factory in self._factories.items()}
        self._schemas = {
            name: [schema_of(tool) for tool in self.tools_of(pool[0]).values()]
            for name, pool in self._pools.items()
        }

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """All that some row may call."""
        every = [self.tools_of(pool[0]) for pool in self._pools.values()]
        return list({name: tool for tools in every for name, tool in tools.items()}.values())

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """A reward function for each class with `get_reward`; rows of other classes get None."""
        kinds = dict.fromkeys(type(pool[0]) for pool in self._pools.values())
        return [_reward_of(kind) for kind in kinds if hasattr(kind, "get_reward")]

    def tools_of(self, environment: Any) -> dict[str, Callable[..., Any]]:
        """What a row may call: its environment's public methods win over functions of all rows."""
        names = [
            name
            for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
            if not name.startswith("_") and name not in NO_TOOLS
        ]
        return self._shared | {name: getattr(environment, name) for name in names}

    def begin(self, rows: Sequence[dict[str, Any]]) -> tuple[list[Any], list[dict[str, Any]]]:
        """Reset an environment for each row of the dataset, in their order.

        Returns them and copies of the rows, with tools and what was observed at the end of prompts.
        """
        taken: Counter[Any] = Counter()
        environments, begun = [], []
        for place, row in enumerate(rows):
            name = None if self._is_single else row.get(CHOICE)
            if name not in self._pools:
                known = list(map(str, self._pools))
                hint = did_you_mean(str(name), known, f" Choose from {', '.join(known)}.")
                words = f"has {CHOICE}={name!r}, which names no environment.{hint}"
                raise ValueError(f"Row {place} of the batch {words}")
            pool = self._pools[name]
            if taken[name] == len(pool):
                pool.append(_made(self._factories[name]))
            environment = pool[taken[name]]
            taken[name] += 1
            given = {key: value for key, value in row.items() if self._is_single or key != CHOICE}
            prompt = _observed(
                row["prompt"], environment.reset(**copy_containers(given)), type(environment)
            )
            options = dict(row.get("chat_template_kwargs") or {})
            options["tools"] = self._schemas[name] or None
            environments.append(environment)
            begun.append(row | {"prompt": prompt, "chat_template_kwargs": options})
        return environments, begun


@dataclasses.dataclass(eq=False)
class EnvironmentBackend(AroundEngine):
    """Resets an environment for each row, and lets another backend complete what it shows."""

    environments: Environments
    encode: Callable[[Sequence[dict[str, Any]]], Prompts]  # tokenizes rows of the dataset
    ranks: Ranks

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row of `prompts.rows` in its environment; see `GenerationBackend`."""
        with self.ranks.fail_together("environments"):
            environments, rows = self.environments.begin(prompts.rows or [])
            begun = self.encode(rows)
            tools = [self.environments.tools_of(environment) for environment in environments]
        found = self.engine.generate(dataclasses.replace(begun, tools=tools), sampling, group_size)
        pairs = zip(environments, begun.messages, strict=True)
        columns = [{"environments": own, "prompt": shown} for own, shown in pairs]
        return dataclasses.replace(found, prompt_ids=begun.token_ids, columns=columns)


def _made(factory: Any) -> Any:
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


def _observed(prompt: Any, observation: Any, kind: type) -> Any:
    """A prompt whose last message goes on with what `reset` returned."""
    if observation is None:
        return prompt
    if not isinstance(observation, (str, list)):
        raise TypeError(
            f"{kind.__name__}.reset returned {observation!r:.80}; it must return None, text, or a "
            "list of content blocks."
        )
    observation = without_surrogates(observation)
    if isinstance(prompt, str):
        raise TypeError(
            f"{kind.__name__}.reset returned {observation!r:.80}, but the prompt is text: an "
            "observation can only be added to a list of messages."
        )
    content = prompt[-1]["content"]
    if isinstance(content, str) and isinstance(observation, str):
        content += observation
    else:
        content = _blocks(content) + _blocks(observation)
    return [*prompt[:-1], prompt[-1] | {"content": content}]


def _blocks(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _reward_of(kind: Any) -> Callable[..., Any]:
    """A reward function that asks the environments of a class, under the name of the class."""

    def reward(environments: Sequence[Any], **others: Any) -> list[Any]:
        return [own.get_reward() if type(own) is kind else None for own in environments]

    async def awaited(environments: Sequence[Any], **others: Any) -> list[Any]:
        return [await own.get_reward() if type(own) is kind else None for own in environments]

    found = awaited if inspect.iscoroutinefunction(kind.get_reward) else reward
    found.__name__ = kind.__name__
    return found
