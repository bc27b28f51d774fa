"""What concerns chat templates, under the module name that scripts import."""

from .data import templates
from .imports import public_names

has_generation_markers = templates.has_generation_markers
is_chat_template_prefix_preserving = templates.is_chat_template_prefix_preserving
__getattr__ = public_names("trl.data")
