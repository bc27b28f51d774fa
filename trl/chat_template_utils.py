"""What concerns chat templates, under the module name that scripts import."""

from .data import templates, tool_template

clone_chat_template = templates.clone_chat_template
has_generation_markers = templates.has_generation_markers
is_chat_template_prefix_preserving = templates.is_chat_template_prefix_preserving
supports_tool_calling = tool_template.supports_tool_calling
