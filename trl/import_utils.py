"""Whether optional packages are installed, under the module name that scripts import."""

from collections.abc import Callable

from .imports import is_at_least, is_available


def __getattr__(name: str) -> Callable[..., bool]:
    if not (name.startswith("is_") and name.endswith("_available")):
        raise AttributeError(f"module 'trl.import_utils' has no attribute {name!r}")
    module = name.removeprefix("is_").removesuffix("_available")

    def is_installed(min_version: str | None = None) -> bool:
        """Whether the package can be imported, and is not older than `min_version`."""
        return is_available(module) and (min_version is None or is_at_least(module, min_version))

    return is_installed
