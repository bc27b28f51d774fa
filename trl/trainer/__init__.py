"""The algorithms, and the skeletons on which they are built."""

from ..imports import check_versions, public_names

check_versions()  # before what an old release lacks is imported
__getattr__ = public_names(__name__)
