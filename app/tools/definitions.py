"""Tools as a client defines them, and what a turn may do with them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from app.domain.errors import FieldOutOfRange


class ToolMode(StrEnum):
    """Whether the model calls tools."""

    NONE = "none"
    AUTO = "auto"
    """The model decides."""
    REQUIRED = "required"
    """The model calls at least one."""


def check_parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments. Raises ValueError if it is one of anything but objects."""
    if schema.get("type", "object") != "object":
        raise ValueError(f"the type must be 'object', not {str(schema['type'])[:64]!r}: arguments have names")
    return schema


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. `parameters` is the JSON Schema of its arguments; None: it takes none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    """Whether arguments must follow the schema even where the model decides to call."""
    lark: str | None = None
    """Of a tool whose only argument `input` is a text: what the text is, as `quoted_lark` writes it; None: any."""
    plain_lark: str | None = None
    """The same, as `plain_lark` writes it."""

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
        return {"type": "object", **self.parameters} if self.parameters else {"type": "object", "properties": {}}


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
    freed: frozenset[str] = frozenset()
    """Those tools whose schemas the grammar of the turn leaves out."""

    @classmethod
    def of(cls, tools: Sequence[Tool], mode: ToolMode, named: frozenset[str] | None, *, parallel: bool) -> Self:
        """The use that a client asks for; `named` are the tools that it allows, None: all.

        Raises `FieldOutOfRange` for a tool that is there twice, or is named and is not there, and for a call that must
        be made without tools.
        """
        names = frozenset(tool.name for tool in tools)
        twice = [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]
        if twice:
            raise FieldOutOfRange(f"tools: {twice[0]!r} is there twice", param="tools")
        if unknown := sorted((named or frozenset()) - names):
            raise FieldOutOfRange(f"tool_choice: there is no tool {unknown[0]!r} in tools", param="tool_choice")
        if mode is ToolMode.REQUIRED and not tools:
            raise FieldOutOfRange("tool_choice: a call that is required needs at least 1 of tools", param="tool_choice")
        return cls(tuple(tools), mode if tools else ToolMode.NONE, names if named is None else named, parallel)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the turn may call."""
        return () if self.mode is ToolMode.NONE else tuple(tool for tool in self.tools if tool.name in self.allowed)

    @property
    def is_held(self) -> bool:
        """Whether a grammar must hold the turn: the model alone might do what the client does not allow."""
        return self.is_narrowed or any(tool.strict for tool in self.callable)

    @property
    def holds_arguments(self) -> bool:
        """Whether calls must follow the schemas of their arguments, beside texts that have a form."""
        return self.is_narrowed or any(tool.strict and tool.lark is None for tool in self.callable)

    @property
    def free(self) -> tuple[Tool, ...]:
        """The tools whose schemas calls need not follow: these only tell the model what to write."""
        return tuple(tool for tool in self.callable if not tool.strict) if self.mode is ToolMode.AUTO else ()

    def holds(self, tool: Tool, *, has_form: bool) -> bool:
        """Whether the turn's grammar makes calls of the tool follow its schema. `has_form`: answers have a form."""
        follows = (self.holds_arguments or has_form) and tool.name not in self.freed
        return follows or tool.lark is not None

    @property
    def is_narrowed(self) -> bool:
        """Whether some calls, or none at all, are what the client does not allow."""
        allowed = self.callable
        narrowed = len(allowed) < len(self.tools) or not self.parallel
        return bool(allowed) and (self.mode is ToolMode.REQUIRED or narrowed)
