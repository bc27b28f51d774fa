"""The public trainers, their options, and the training loop."""

from ..imports import check_versions, lazy_exports

check_versions()  # before what an old release lacks is imported
__getattr__ = lazy_exports(__name__)
