"""The algorithms, and the skeletons on which they are built."""

from ..imports import check_versions, lazy_exports

check_versions()  # before what an old release lacks is imported
__getattr__ = lazy_exports(__name__)
