"""The data utilities under the module name that scripts import."""

from .data.formats import common_prefix_length as common_prefix_length
from .imports import public_names

__getattr__ = public_names("trl.data", "trl.generation.tools", "trl.cli")
