"""A model's chat template, rendered as Transformers renders it: the same variables, filters and tests.

Transformers' own takes a second to import. A template is a stranger's program: it runs in Jinja's sandbox, and sees
plain JSON only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry reasoning; templates read the first or the second."""
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that are not the caller's."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a message that is left open."""


class ChatTemplate:
    """The template `source`, compiled. `variables` are there beside the messages. Any thread may render it."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._source = source
        self._variables = dict(variables)
        self._compiled: Template | None = None

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names of further variables that the template reads. Raises TemplateError for an invalid one."""
        found = find_undeclared_variables(_ENVIRONMENT.parse(self._source))
        return frozenset(found - _RESERVED - self._variables.keys() - _ENVIRONMENT.globals.keys())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The text of a chat. `messages` are plain JSON, and so are the further `variables`, which are among those that
        it `reads`. Raises TemplateError, ValueError and what a template can.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        chat = [_normal(message) for message in messages]
        final = _mark_end(chat[-1]) if continue_final_message else ""
        if self._compiled is None:
            self._compiled = _ENVIRONMENT.from_string(self._source)
        text = self._compiled.render(
            messages=chat,
            tools=[dict(tool) for tool in tools] or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
            **variables,
        )
        return _cut_at_end(text, final) if continue_final_message else text


def _normal(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without what is null, with its reasoning under each name that templates read."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _mark_end(message: dict[str, Any]) -> str:
    """Put the tag at the end of the message's text; returns the text without it."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _TAG
        return content
    parts = [dict(part) if isinstance(part, dict) else part for part in content] if isinstance(content, list) else []
    for part in reversed(parts):
        if isinstance(part, dict) and "text" in part:
            text = str(part["text"])
            part["text"] = text + _TAG
            message["content"] = parts
            return text
    raise ValueError("the final message has no text to continue")


def _cut_at_end(text: str, final: str) -> str:
    tag = _TAG.strip()
    if tag not in text or final.strip() not in text:
        raise ValueError("the template changes the final message, so it cannot be continued")
    end = text.rindex(tag)
    return text[:end] if text.startswith(_TAG, end) else text[:end].rstrip()


class _Generation(Extension):
    """`{% generation %}`: marks what the assistant has said, and renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    @staticmethod
    def _render(caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Refuses names that would reach into Python."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args  # `self` is a name that a template may use
        attributes = dict(*given, **values)
        for name in attributes:
            _require_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        Namespace.__setitem__(self, name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: it begins with an underscore")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """`dict` in a template, without the type's other attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made


_ENVIRONMENT = _environment()
