"""The algorithms, and the skeletons on which they are built."""

from ..imports import public_names

__getattr__ = public_names(__name__)
