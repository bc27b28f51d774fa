"""The training commands as modules that `accelerate launch --module` starts."""

from ..imports import public_names

__getattr__ = public_names("trl.cli")
