"""The data utilities under the module name that scripts import."""

from .data.formats import common_prefix_length as common_prefix_length
from .imports import lazy_exports

__getattr__ = lazy_exports("trl.data", "trl.generation.tools", "trl.cli")
