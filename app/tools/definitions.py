"""Tools as a client defines them, and what it allows the model to do with them. No third-party imports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ToolMode(StrEnum):
    """Whether the model calls tools."""

    NONE = "none"
    AUTO = "auto"
    """The model decides."""
    REQUIRED = "required"
    """The model calls at least one."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. `parameters` is the JSON Schema of its arguments; None: it takes none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    """Whether arguments must follow the schema even where the model decides to call."""

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.schema
        return {"type": "function", "function": function}

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of its arguments."""
        return dict(self.parameters) if self.parameters else {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one turn may do with `tools`.

    `allowed` are the names that it may call, a subset of the tools that the prompt shows.
    """

    tools: tuple[Tool, ...] = ()
    mode: ToolMode = ToolMode.NONE
    allowed: frozenset[str] = field(default_factory=frozenset)
    parallel: bool = True
    """Whether the turn may hold several calls."""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the turn may call."""
        return () if self.mode is ToolMode.NONE else tuple(tool for tool in self.tools if tool.name in self.allowed)

    @property
    def is_held(self) -> bool:
        """Whether a grammar must hold the turn: the model alone might do what the client does not allow."""
        allowed = self.callable
        if not allowed:
            return False
        narrowed = len(allowed) < len(self.tools) or not self.parallel
        return self.mode is ToolMode.REQUIRED or narrowed or any(tool.strict for tool in allowed)
