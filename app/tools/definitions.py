"""Tools as a client defines them, and how each family of models writes a call."""

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
    def is_narrowed(self) -> bool:
        """Whether some calls, or none at all, are what the client does not allow."""
        allowed = self.callable
        narrowed = len(allowed) < len(self.tools) or not self.parallel
        return bool(allowed) and (self.mode is ToolMode.REQUIRED or narrowed)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's way to write calls: `opening` call `separator` call ... `closing`.

    A call is `before` {"name": NAME, `arguments_key`: ARGUMENTS} `after`.
    """

    name: str
    arguments_key: str
    marker: str = ""
    """The text or special token that begins calls; empty where a call is all of an answer."""
    end_marker: str = ""
    """What ends calls, if anything does."""
    opening: str = ""
    before: str = ""
    after: str = ""
    separator: str = ""
    closing: str = ""
    id_characters: int = 24
    """Length of a call's id without its prefix; templates may check it."""
    id_prefix: str = "call_"
    can_repeat: bool = True
    """Whether an answer may hold several calls."""
    has_names: bool = False
    """Whether newer models of the family write a name after the marker, then the object of the arguments."""
    inner_markers: tuple[str, ...] = ()
    """What those write between the name and the arguments."""

    def write(self, name: str, arguments: str) -> str:
        """One call as text. `name` and `arguments` are JSON texts."""
        return f'{self.before}{{"name": {name}, "{self.arguments_key}": {arguments}}}{self.after}'

    def write_all(self, calls: list[str]) -> str:
        """Calls that `write` has made, as one text."""
        return self.opening + self.separator.join(calls) + self.closing


HERMES = ToolFormat(
    "hermes",
    "arguments",
    marker="<tool_call>",
    end_marker="</tool_call>",
    before="<tool_call>\n",
    after="\n</tool_call>",
    separator="\n",
)
"""Hermes, Qwen 2.5 and 3, SmolLM3, and every model whose template has no form of its own. Qwen3-Coder has it where a
grammar holds it, and writes `<function=` by itself.
"""

MISTRAL = ToolFormat(
    "mistral",
    "arguments",
    marker="[TOOL_CALLS]",
    opening="[TOOL_CALLS] [",
    separator=", ",
    closing="]",
    id_characters=9,
    id_prefix="",
    has_names=True,
    inner_markers=("[CALL_ID]", "[ARGS]"),
)
"""Mistral and Mixtral; `write` is for the third version of their tokenizer and those before it."""

LLAMA = ToolFormat("llama", "parameters", can_repeat=False)
"""Llama 3.1 and later: the call is the whole answer."""

_SIGNS = (("[TOOL_CALLS]", MISTRAL), ("<tool_call>", HERMES), ('"parameters": ', LLAMA))


def find_format(chat_template: str | None) -> ToolFormat:
    """The format that the source of a chat template shows."""
    return next((form for sign, form in _SIGNS if chat_template and sign in chat_template), HERMES)
