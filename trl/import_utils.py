"""Whether optional packages are installed, under the module name that scripts import."""

from collections.abc import Callable
from functools import partial

from .imports import is_available


def __getattr__(name: str) -> Callable[[], bool]:
    if name.startswith("is_") and name.endswith("_available"):
        return partial(is_available, name.removeprefix("is_").removesuffix("_available"))
    raise AttributeError(f"module 'trl.import_utils' has no attribute {name!r}")
