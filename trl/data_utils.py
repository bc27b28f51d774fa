"""The data utilities under the module name that scripts import."""

from .data import formats
from .imports import public_names

common_prefix_length = formats.common_prefix_length
__getattr__ = public_names("trl.data")
