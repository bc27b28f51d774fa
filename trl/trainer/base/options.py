"""Checking the values of options, and what becomes of their old names."""

import dataclasses
import inspect
import json
import math
import re
import typing
import warnings
from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import dataclass
from enum import EnumType
from functools import cache
from pathlib import Path
from types import MethodType, UnionType
from typing import Any, ClassVar

from ...options import COMPARISONS
from ...suggestions import commonly_meant, did_you_mean

WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
KINDS = {int: "an integer", float: "a number", bool: "True or False"}
KINDS |= {str: "text", list: "a list"}
Values = Mapping[str, Any]
MAPPING = "a dictionary, or a JSON object such as '{\"a\": 1}'"


def check_options(config: Any, inherited: Mapping[str, Mapping[str, float]] | None = None) -> None:
    """Check the values of a dataclass, and the bounds of `inherited` options, else a ValueError."""
    others, kinds = inherited or {}, kinds_of(config.__class__)
    for field in dataclasses.fields(config):
        value, known, kind = getattr(config, field.name, None), field.metadata, kinds[field.name]
        is_checked = known.get("bounds") or "choices" in known
        if value is None and (type(None) in kind or not is_checked):
            continue
        bounds = known.get("bounds") or others.get(field.name, {})
        if problem := _problem(value, known, bounds, kind):
            raise ValueError(f"{field.name}={value!r} must be {problem}")


def _problem(value: Any, known: Values, bounds: Values, kinds: list[Any]) -> str | None:
    is_broken = isinstance(value, float) and {int, float}.intersection(kinds) == {int}
    if bounds or is_broken:
        return _out_of_range(value, bounds, known.get("hint", ""), is_broken)
    enums: list[Any] = [kind for kind in kinds if isinstance(kind, EnumType)]
    if "choices" in known or enums:
        choices = known.get("choices") or [x.value for x in enums[0]]
        hint = did_you_mean(str(value), choices)
        return None if value in choices else f"one of {', '.join(choices)}.{hint}"
    return _wrong_kind(value, kinds)


def _out_of_range(value: Any, bounds: Values, hint: str, is_broken: bool) -> str | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and all(COMPARISONS[kind](value, bound) for kind, bound in bounds.items()):
        nearest = f"; the nearest is {value:.0f}" if math.isfinite(value) else ""
        return f"an integer{nearest}." if is_broken else None
    legal = " and ".join(f"{WORDS[kind]} {bound:g}" for kind, bound in bounds.items())
    kind = "an integer, " if is_broken else "" if is_number else "a number, "
    return f"{kind}{legal}{hint}."


@cache
def kinds_of(config_class: Any) -> dict[str, list[Any]]:
    """The types that the options of a dataclass may have."""
    unions = {
        name: typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
        for name, hint in typing.get_type_hints(config_class).items()
    }
    return {name: [typing.get_origin(x) or x for x in found] for name, found in unions.items()}


def _wrong_kind(value: Any, kinds: list[Any]) -> str | None:
    """Text would be true where it says false, and be taken apart into letters for a list."""
    if dict in kinds:
        is_mapping = not isinstance(from_json(value), str | list | int | float)
        missing = " There is no such file." * str(value).endswith(".json")
        return None if is_mapping or Path(str(value)).is_file() else f"{MAPPING}.{missing}"
    is_number = isinstance(value, (int, float)) and value is not False
    legal = {str} if isinstance(value, str) else {int, float, bool} if is_number else {*kinds}
    words = [KINDS[kind] for kind in kinds if kind in KINDS]
    return f"{' or '.join(words)}." if words and legal.isdisjoint(kinds) else None


def from_json(value: Any) -> Any:
    """What JSON text stands for; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


@dataclass(frozen=True)
class RemovedOption:
    """An old name that nothing replaces."""

    advice: str = ""  # what to do instead
    is_error: bool = False  # refused instead of ignored


def ignored(advice: str, *names: str) -> dict[str, str | RemovedOption]:
    """Old names without effect."""
    return dict.fromkeys(names, RemovedOption(advice))


def refused(advice: str, *names: str) -> dict[str, str | RemovedOption]:
    """Old names whose effect is not to be lost silently."""
    return dict.fromkeys(names, RemovedOption(advice, is_error=True))


# Options of earlier releases of transformers.
EARLIER_ARGUMENTS: dict[str, str | RemovedOption] = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "warmup_ratio": "warmup_steps",  # of which values below 1 are shares
    **ignored("set the environment variable TENSORBOARD_LOGGING_DIR", "logging_dir"),
    **ignored(
        "a run always writes into output_dir; to continue one, use resume_from_checkpoint",
        "overwrite_output_dir",
    ),
    **ignored("weights are always saved as safetensors", "save_safetensors"),
    **refused("use optim='adafactor'", "adafactor"),
}


class _Construction(ABCMeta):  # a subclass may have abstract classes as bases, too
    """What happens to keyword arguments before a constructor is called."""

    legacy_options: dict[str, Any]

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor, where inspection would find `__call__`."""
        return inspect.signature(MethodType(cls.__init__, cls))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        known, table = _arguments_of(cls), cls.legacy_options
        old = {name: kwargs.pop(name) for name in list(kwargs) if name in table}
        old = {name: value for name, value in old.items() if value is not None}
        given = dict(zip(known, args, strict=False)) | kwargs
        made: Any = cls.__new__(cls)  # type: ignore[arg-type,call-arg]
        made.given_by_old_names = frozenset(old)
        try:
            made.__init__(*args, **kwargs, **_translate(cls.__name__, table, old, given))
        except TypeError as error:
            # Python alone knows what the constructors of users' subclasses take out of keywords.
            found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            name = found[1] if found else ""
            if name in known or name not in kwargs:
                raise
            meant = commonly_meant(name, known)
            hint = f" Did you mean {meant}?" if meant else did_you_mean(name, known)
            raise TypeError(f"{cls.__name__} has no argument {name!r}.{hint}") from error
        return made


class StrictKeywordArguments(metaclass=_Construction):
    """Refuses keyword arguments that the constructor does not have, and says what may be meant.

    Old names are accepted, with one warning for each construction that names the new ones. Giving
    an old name together with its new one, or a removed name, is an error.
    """

    legacy_options: ClassVar[dict[str, Any]] = {}  # old name -> new name, or why there is none
    given_by_old_names = frozenset[str]()  # which of them were


def _arguments_of(kind: type) -> dict[str, None]:
    """The names of the arguments of a constructor, and of those that it hands others on to."""
    found: dict[str, None] = {}
    for each in kind.__mro__:
        if "__init__" in vars(each):
            _, *parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
            others = [x for x in parameters if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
            found |= dict.fromkeys(x.name for x in parameters if x not in others)
            if not others:
                break
    return found


def _translate(owner: str, table: Values, old: Values, given: Values) -> dict[str, Any]:
    """Values of old names by their new ones; one warning names all of them."""
    changes, words = {}, []
    for name, value in old.items():
        new = table[name]
        if isinstance(new, RemovedOption):
            if new.is_error:
                raise TypeError(f"{name}={value!r} is no option of {owner} any more: {new.advice}.")
            words.append(f"{name} has no effect{f' ({new.advice})' if new.advice else ''}")
            continue
        if given.get(new) is not None:
            raise ValueError(f"{owner}: both {name} and {new} were given; use {new} alone.")
        words.append(f"{name} is now {new}")
        changes[new] = value
    if words:
        warnings.warn(f"{owner}: {'; '.join(words)}.", FutureWarning, stacklevel=3)
    return changes
