"""Keyword arguments of configurations and trainers: misspelled names, and names of old releases."""

import inspect
import warnings
from abc import ABCMeta
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

from ...suggestions import commonly_meant, did_you_mean

PACKAGE = __name__.partition(".")[0]
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class RemovedOption:
    """What happens to an old name that has no new one."""

    advice: str = ""  # what to do instead
    is_error: bool = False  # refused instead of ignored


LegacyNames = Mapping[str, str | RemovedOption]  # by old name: the new name, or why there is none


def ignored(advice: str, *names: str) -> dict[str, str | RemovedOption]:
    """Return entries of `legacy_options` for names that have no effect any more."""
    return dict.fromkeys(names, RemovedOption(advice))


def refused(advice: str, *names: str) -> dict[str, str | RemovedOption]:
    """Return entries of `legacy_options` for names that must not be ignored silently."""
    return dict.fromkeys(names, RemovedOption(advice, is_error=True))


# Options of earlier releases of transformers.
EARLIER_ARGUMENTS: dict[str, str | RemovedOption] = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "warmup_ratio": "warmup_steps",  # a value below 1 is a share of all steps
    **ignored("set the environment variable TENSORBOARD_LOGGING_DIR", "logging_dir"),
    **ignored(
        "a run always writes into output_dir; to continue one, use resume_from_checkpoint",
        "overwrite_output_dir",
    ),
    **ignored("weights are always saved as safetensors", "save_safetensors"),
    **refused("use optim='adafactor'", "adafactor"),
}


class _StrictConstruction(ABCMeta):  # because a user's subclass may have abstract base classes
    """Checks and renames keyword arguments before a constructor is called."""

    legacy_options: Mapping[str, Any]

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature of the constructor, where `inspect` would show that of `__call__`."""
        return inspect.signature(MethodType(cls.__init__, cls))

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        argument_names = _argument_names(cls)
        old_values: dict[str, object] = {}
        for name in [name for name in kwargs if name in cls.legacy_options]:
            value = kwargs.pop(name)
            if value is not None:
                old_values[name] = value
        unknown_names = [name for name in kwargs if name not in argument_names]
        if unknown_names and not _may_consume_keywords(cls):
            raise _unknown_argument(cls, unknown_names[0], argument_names)
        new_values = dict(zip(argument_names, args, strict=False)) | kwargs
        renamed_values = _rename(cls, old_values, new_values)
        instance: Any = cls.__new__(cls)  # type: ignore[arg-type,call-arg]
        instance.given_by_old_names = frozenset(old_values)
        try:
            instance.__init__(*args, **kwargs, **renamed_values)
        except TypeError as error:
            # A keyword that a user's subclass handed on, and no constructor has.
            for name in unknown_names:
                if f"unexpected keyword argument '{name}'" in str(error):
                    raise _unknown_argument(cls, name, argument_names) from error
            raise
        return instance


class StrictKeywordArguments(metaclass=_StrictConstruction):
    """Refuses keyword arguments that the constructor lacks, and suggests the name that is meant.

    Old names in `legacy_options` are accepted; each construction gives one warning with all new
    names. A TypeError is raised for a removed name, a ValueError for an old name together with its
    new one.
    """

    legacy_options: ClassVar[Mapping[str, Any]] = {}  # `LegacyNames`
    given_by_old_names = frozenset[str]()  # the old names that were used for this instance


def _constructors(cls: type) -> list[tuple[type, list[inspect.Parameter]]]:
    """Return the classes whose constructors run, and parameters of these, without `self`.

    A constructor with variadic parameters passes them on to the next one; other constructors end
    the list.
    """
    constructors = []
    for base in cls.__mro__:
        if "__init__" in vars(base):
            _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            constructors.append((base, parameters))
            if not any(parameter.kind in VARIADIC for parameter in parameters):
                break
    return constructors


def _argument_names(cls: type) -> list[str]:
    """Return the names of a class's constructor arguments, in order."""
    names: dict[str, None] = {}
    for _, parameters in _constructors(cls):
        names |= dict.fromkeys(x.name for x in parameters if x.kind not in VARIADIC)
    return list(names)


def _may_consume_keywords(cls: type) -> bool:
    """Whether a user's subclass has `**kwargs`, from which it may take arguments of its own."""
    return any(
        base.__module__.partition(".")[0] != PACKAGE
        and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        for base, parameters in _constructors(cls)
    )


def _unknown_argument(cls: type, name: str, argument_names: Iterable[str]) -> TypeError:
    meant = commonly_meant(name, argument_names)
    hint = f" Did you mean {meant}?" if meant else did_you_mean(name, argument_names)
    return TypeError(f"{cls.__name__} has no argument {name!r}.{hint}")


def _rename(
    cls: _StrictConstruction, old_values: Mapping[str, object], new_values: Mapping[str, object]
) -> dict[str, object]:
    """Return the values of old names by new names; one warning names all of them."""
    renamed_values: dict[str, object] = {}
    notices: list[str] = []
    for name, value in old_values.items():
        new_name = cls.legacy_options[name]
        if isinstance(new_name, RemovedOption):
            advice = new_name.advice
            if new_name.is_error:
                raise TypeError(
                    f"{name}={value!r} is no option of {cls.__name__} any more: {advice}."
                )
            notices.append(
                f"{name} has no effect ({advice})" if advice else f"{name} has no effect"
            )
            continue
        if new_values.get(new_name) is not None:
            raise ValueError(
                f"{cls.__name__}: both {name} and {new_name} were given; use {new_name} alone."
            )
        notices.append(f"{name} is now {new_name}")
        renamed_values[new_name] = value
    if notices:
        warnings.warn(f"{cls.__name__}: {'; '.join(notices)}.", FutureWarning, stacklevel=3)
    return renamed_values
