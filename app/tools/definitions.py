"""Tools as a client defines them, what a turn may do with them, and how a chat has them: for templates that write tools
and calls, and for those that do not.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from app.domain.errors import FieldOutOfRange
from app.domain.text import is_nested_too_deep, whole_characters
from app.tools.formats import ToolFormat

Message = Mapping[str, Any]
"""A message as chat templates read it; the arguments of its calls are texts, most of them of JSON objects."""
PREFIX_END = "END_OF_A_SHARED_PREFIX"
"""Marks the end of a prefix that other chats may share, in a copy of the chat that the model never sees."""


class ToolMode(StrEnum):
    """Whether the model calls tools."""

    NONE = "none"
    AUTO = "auto"
    """The model decides."""
    REQUIRED = "required"
    """The model calls at least one."""


def check_parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments. Raises ValueError if it is one of anything but objects."""
    if schema.get("type", "object") not in ("object", None):
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
        return {"type": "object", **(self.parameters or {"properties": {}})} | {"type": "object"}


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
        """The use that a client asks for; `named` are the tools that it allows, None: all. Without tools it is none.

        Raises `FieldOutOfRange` for a tool that is there twice, or is named and is not there, and for a call that must
        be made without tools.
        """
        names = frozenset(tool.name for tool in tools)
        twice = [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]
        if twice:
            raise FieldOutOfRange.at("tools", f"{twice[0]!r} is there twice")
        if unknown := sorted((named or frozenset()) - names):
            raise FieldOutOfRange.at("tool_choice", f"there is no tool {unknown[0]!r} in tools")
        if mode is ToolMode.REQUIRED and not tools:
            raise FieldOutOfRange.at("tool_choice", "a call that is required needs at least 1 of tools")
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


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The calls of a message. What a client has put there in another form is for the template alone."""
    found: Any = message.get("tool_calls")
    functions = [each.get("function") for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    texts = [each.get(key) for each in functions if isinstance(each, dict) for key in ("name", "arguments")]
    has_form = isinstance(found, list) and len(texts) == 2 * len(found) and all(isinstance(each, str) for each in texts)
    return found if has_form else []


def messages_for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages for a template that writes calls itself: arguments become objects where they are JSON objects."""
    written = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": _as_object(call["function"]["arguments"])}}
            for call in calls_of(message)
        ]
        written.append({**message, "tool_calls": calls} if calls else dict(message))
    return written


def messages_as_text(messages: Sequence[Message], form: ToolFormat) -> list[dict[str, Any]]:
    """The messages for a template that knows no calls.

    - A call is text of the assistant, as the model wrote it.
    - What tools answered is a message of the user.
    """
    return list(_join_answers(_as_text(message, form) for message in messages))


def with_instructions(messages: list[dict[str, Any]], tools: Sequence[Tool], form: ToolFormat) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools: the system's begins with them, and with how to call them."""
    about = _instructions(tools, form)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{about}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": about}, *messages]


def _as_object(arguments: str) -> Any:
    """Arguments as an object; a text that is none stays a text, as the model left it. Clients write none as `""`.

    A text that is nested too deep stays a text too: templates follow an object level by level.
    """
    arguments = whole_characters(arguments)
    if is_nested_too_deep(arguments):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_text(message: Message, form: ToolFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "tool", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        form.write(json.dumps(call["function"]["name"]), whole_characters(call["function"]["arguments"]) or "{}")
        for call in calls_of(message)
    ]
    if not calls:
        return dict(message)
    said = [message["content"]] if message["content"] else []
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*said, form.write_all(calls)])}


def _join_answers(messages: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Answers of tools that follow each other are one message: templates may want users and assistants in turns."""
    answers: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            answers.append(message["content"])
            continue
        if answers:
            yield {"role": "user", "content": "\n".join(answers)}
            answers = []
        yield message
    if answers:
        yield {"role": "user", "content": "\n".join(answers)}


def _instructions(tools: Sequence[Tool], form: ToolFormat) -> str:
    listed = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    call = form.write_all([form.write("NAME", "ARGUMENTS")])
    return (
        f"You can call the functions below. Each line describes one, with a JSON Schema of its arguments.\n"
        f"<tools>\n{listed}\n</tools>\n"
        f"To call a function, answer in this form, with a JSON object in place of ARGUMENTS:\n{call}"
    )


def mark_instructions(chat: Sequence[Message]) -> list[dict[str, Any]]:
    """The chat with a mark after its leading instructions and the tools: where the text of the first other message
    begins.
    """
    marked = [dict(message) for message in chat]
    for message in marked:
        if message["role"] not in ("system", "developer"):
            message["content"] = f"{PREFIX_END}{message.get('content') or ''}"
            break
    return marked
