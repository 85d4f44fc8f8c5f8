"""From an answer's text, as it comes, to its content and its calls of tools."""

import json
import re
import secrets
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from app.tools.formats import CALLS, ToolFormat

_HEAD = re.compile(
    r'[\s,;\[\]}]*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_CLOSING = "}] \n\t\r,;"
_ID_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call begins; `index` counts the calls of the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which together are the text of a JSON object."""

    index: int
    text: str


Piece = Content | CallBegun | CallArguments


class AnswerReader:
    """Reads one answer. Text that is no call that can be read is content, so that nothing is lost.

    Arguments come as the model wrote them, piece by piece, where a call has its usual form. `template` is the
    checkpoint's own response template, or the format's.
    """

    def __init__(self, form: ToolFormat, template: ResponseTemplate) -> None:
        self._form = form
        self._parser = ResponseParser(template, prefix="")
        self.calls = 0
        """How many calls have begun."""
        self._region = ""
        """Text of the region of calls that is open, from where it has not been read."""
        self._space = ""
        """White space at the end of the content so far: around calls it says nothing."""
        self._arguments: _JsonObject | None = None
        """The arguments that are being read, or were read last."""

    def push(self, text: str) -> Iterator[Piece]:
        """Take the next text."""
        yield from self._pieces(self._parser.feed(text))

    def finish(self) -> Iterator[Piece]:
        """What is left when no more text comes."""
        yield from self._pieces(self._parser.finalize()[1])
        if self._space and not self.calls:
            yield Content(self._space)

    def _pieces(self, events: list[dict[str, Any]]) -> Iterator[Piece]:
        for event in events:
            kind, is_call = event["type"], event["field"] == CALLS
            if kind == "region_chunk" and is_call and not event["dirty"]:
                self._region += event["text"]
                yield from self._read_region()
            elif kind == "region_chunk" and not is_call:
                yield from self._content(event["text"])
            elif kind == "region_close" and is_call:
                yield from self._close_region(event["value"])

    def _content(self, text: str) -> Iterator[Piece]:
        said = (self._space + text).rstrip()
        self._space = (self._space + text)[len(said) :]
        if said:
            yield Content(said)

    def _read_region(self) -> Iterator[Piece]:
        """Read calls of the usual form as far as their text has come."""
        while True:
            if self._arguments is None or self._arguments.is_complete:
                head = _HEAD.match(self._region)
                if head is None:
                    return
                yield self._begin(json.loads(head["name"], strict=False))
                self._region = self._region[head.end() :]
                self._arguments = _JsonObject()
            if taken := self._arguments.take(self._region):
                yield CallArguments(self.calls - 1, self._region[:taken])
                self._region = self._region[taken:]
            if not self._arguments.is_complete:
                return

    def _close_region(self, value: Any) -> Iterator[Piece]:
        """Read what is left of a region: calls in another form, or text that is none."""
        left = self._region if self._arguments is None else self._region.strip(_CLOSING)
        calls = _parse_calls(left) if left.strip() else _calls_in([value]) if isinstance(value, dict) else []
        if calls is None:
            yield from self._content(f"{self._form.marker}{left}{self._form.after.strip()}")
        for name, arguments in calls or ():
            yield from self._whole_call(name, arguments)
        self._region, self._arguments = "", None

    def _whole_call(self, name: str, arguments: str) -> Iterator[Piece]:
        yield self._begin(name)
        yield CallArguments(self.calls - 1, arguments)

    def _begin(self, name: str) -> CallBegun:
        index, self.calls, self._space = self.calls, self.calls + 1, ""
        letters = "".join(secrets.choice(_ID_ALPHABET) for _ in range(self._form.id_characters))
        return CallBegun(index, self._form.id_prefix + letters, name)


class _JsonObject:
    """Finds the end of a JSON object in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.is_complete = False

    def take(self, text: str) -> int:
        """How many characters of `text` belong to it."""
        for index, character in enumerate(text):
            if self.is_complete:
                return index
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                self.is_complete = not self._depth
        return len(text)


def _parse_calls(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments of one call or a list of them as JSON; None if it is something else."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return _calls_in(found if isinstance(found, list) else [found])


def _calls_in(found: list[Any]) -> list[tuple[str, str]] | None:
    calls = []
    for each in found:
        call = each.get("function", each) if isinstance(each, dict) else {}
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return None
        calls.append((call["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls
