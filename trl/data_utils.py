"""The data utilities under the module name that scripts import."""

from .data import preference
from .imports import public_names

common_prefix_length = preference.common_prefix_length
__getattr__ = public_names("trl.data")
