"""Options of completions that call tools."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.base_config import BaseConfig
from ..base.options import option


@dataclass
class AgentConfig(BaseConfig):
    """Configuration of tool calls, for every trainer that generates completions."""

    max_tool_calling_iterations: int | None = option(
        None, "Most turns of a completion whose tool calls are answered. None: no limit."
    )
    tool_timeout: float | None = option(
        60.0, "Seconds a tool call may take. None: no limit, and tools run in the main thread."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        turns, seconds = self.max_tool_calling_iterations, self.tool_timeout
        if turns is not None and turns < 0:
            raise ValueError(f"max_tool_calling_iterations={turns} must be at least 0.")
        if seconds is not None and seconds <= 0:
            raise ValueError(f"tool_timeout={seconds} must be above 0; None means no limit.")
