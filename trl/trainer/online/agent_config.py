"""Options of completions that call tools."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.base_config import BaseConfig
from ..base.options import option


@dataclass
class AgentConfig(BaseConfig):
    """Configuration of tool calls, for every trainer that generates completions."""

    max_tool_calling_iterations: int | None = option(
        None, "Most turns of a completion whose tool calls are answered. None: no limit.", ge=0
    )
    tool_timeout: float | None = option(
        60.0,
        "Seconds a tool call may take. None: no limit, and tools run in the main thread.",
        gt=0,
        hint="None: no limit",
    )
