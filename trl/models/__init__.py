"""The policy: loading, adapters, reference policy, scoring."""

from ..imports import public_names

__getattr__ = public_names(__name__)
