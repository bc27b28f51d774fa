"""What the commands run."""

from ..imports import public_names

__getattr__ = public_names(__name__)
