"""Utilities for chat templates, under the module name that scripts import."""

from .data.templates import has_generation_markers as has_generation_markers
from .generation.tools.templates import (
    is_chat_template_prefix_preserving as is_chat_template_prefix_preserving,
)
from .imports import lazy_exports

__getattr__ = lazy_exports("trl.data", "trl.generation.tools", "trl.cli")
