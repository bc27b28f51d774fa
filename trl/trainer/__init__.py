"""The online skeleton and the algorithms on it."""

from ..imports import public_names

__getattr__ = public_names(__name__)
