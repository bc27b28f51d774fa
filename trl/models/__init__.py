"""The policy: loading, adapters, reference policy, scoring."""

from ..imports import lazy_exports

__getattr__ = lazy_exports(__name__)
