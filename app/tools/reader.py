"""Answers in the format of a model's family, read as they come."""

import json
import re
import secrets
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from app.messages import TurnFinished
from app.text.generation import TextChunk
from app.tools.definitions import ToolFormat

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


class AnswerReader(Protocol):
    """Reads one answer as it comes. Text that is no call that can be read is content, so that nothing is lost.

    No text makes it raise, and each character costs the same, however long the answer is.
    """

    @property
    def is_whole(self) -> bool:
        """Whether there are calls, and the arguments of each are a JSON object to its end."""
        ...

    def push(self, text: str) -> Iterator[Piece]:
        """Take the next text."""
        ...

    def finish(self) -> Iterator[Piece]:
        """What is left when no more text comes."""
        ...


class Answer:
    """One answer as every API tells it: what the model says and calls, piece by piece."""

    def __init__(self, reader: AnswerReader | None = None) -> None:
        """`reader` finds the calls; None: there are no tools, and all of the answer is content."""
        self._reader = reader
        self._called: list[str] = []
        self.stop: str | None = None
        """The stop string that ended it."""

    def pieces(self, item: TextChunk | TurnFinished) -> list[Piece]:
        """What the turn's next item says."""
        pieces: Iterable[Piece]
        if isinstance(item, TextChunk):
            self.stop = item.stop
            pieces = self._reader.push(item.text) if self._reader else [Content(item.text)]
        else:
            pieces = self._reader.finish() if self._reader else ()
        found = list(pieces)
        self._called += [piece.name for piece in found if isinstance(piece, CallBegun)]
        return found

    @property
    def calls(self) -> list[str]:
        """The tools that the client is to call: none if one of the calls is cut."""
        return self._called if self._reader is not None and self._reader.is_whole else []


class Speech:
    """The content of an answer without white space around calls, where it says nothing."""

    def __init__(self) -> None:
        self._space: list[str] = []

    def say(self, text: str) -> Iterator[Content]:
        """The next content, up to white space at its end."""
        said = text.rstrip()
        if said:
            yield Content("".join([*self._space, said]))
            self._space.clear()
        self._space.append(text[len(said) :])

    def drop_space(self) -> None:
        """A call comes next."""
        self._space.clear()

    def finish(self) -> Iterator[Content]:
        """The white space at the end of an answer without calls."""
        if space := "".join(self._space):
            yield Content(space)


def new_call_id(form: ToolFormat) -> str:
    """An id that templates of the family take."""
    letters = "".join(secrets.choice(_ID_ALPHABET) for _ in range(form.id_characters))
    return form.id_prefix + letters


def read_calls(found: object) -> list[tuple[str, str]] | None:
    """Names and arguments, as texts of JSON, of one call or a list of them; None if it is something else."""
    calls = []
    for each in found if isinstance(found, list) else [found]:
        call: Any = each.get("function", each) if isinstance(each, dict) else {}
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or not is_name(name):
            return None
        calls.append((str(name), json.dumps(arguments)))
    return calls


def is_name(name: object) -> bool:
    """Whether it can be told as the name of a tool: half of a surrogate pair cannot."""
    return isinstance(name, str) and name.isprintable()


def load_json(text: str) -> object:
    """The value that a model wrote, None if it is none: any text may come."""
    try:
        value: object = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value


class JsonScan:
    """Follows brackets and strings. Whether the object is valid, only reading it shows."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.is_complete = False

    def take(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
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
                self.is_complete = self._depth <= 0
        return len(text)


MAX_HEAD = 300
"""Characters within which a call of the usual form begins its arguments."""
SEPARATORS = " \t\r\n,;[]"
"""What may stand between calls."""
PYTHON_TAG = "<|python_tag|>"
_HEAD = re.compile(r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class _State(Enum):
    START = auto()
    """Nothing has come but white space, and only the beginning of an answer can be a call."""
    CONTENT = auto()
    BETWEEN = auto()
    """After a marker or a call."""
    HEAD = auto()
    """In the object of a call, before its arguments."""
    ARGUMENTS = auto()
    REST = auto()
    """In the object of a call, after its arguments."""
    OBJECT = auto()
    """In an object that does not begin as a call does."""


class FamilyReader:
    """An `AnswerReader`. Arguments come as the model wrote them, piece by piece, where a call has its usual form."""

    def __init__(self, form: ToolFormat, *, only_at_start: bool = False, only_calls: bool = False) -> None:
        """`only_at_start`: an answer that does not begin with a call has none, whatever it says.

        `only_calls`: the answer's grammar allows nothing else. If it is cut, its end is markup and no content.
        """
        self._form = form
        self._only_calls = only_calls
        self._only_at_start = only_at_start or not form.marker
        self._state = _State.START if self._only_at_start else _State.CONTENT
        self._text = ""
        """What has not been read."""
        self._unclaimed: list[str] = []
        """What has been read since the content or the last call ended: it is content if no call follows."""
        self._object: list[str] = []
        self._scan, self._arguments_scan = JsonScan(), JsonScan()
        self._arguments: list[str] = []
        self._speech = Speech()
        self.calls = 0
        self._whole = 0

    @property
    def is_whole(self) -> bool:
        return 0 < self.calls == self._whole

    def push(self, text: str) -> Iterator[Piece]:
        self._text += text
        return self._told(self._read(last=False))

    def finish(self) -> Iterator[Piece]:
        return self._told(self._finish())

    def _told(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        return (piece for piece in pieces if not (self._only_calls and isinstance(piece, Content)))

    def _finish(self) -> Iterator[Piece]:
        yield from self._read(last=True)
        self._unclaimed.append(self._text)
        if self._state not in (_State.ARGUMENTS, _State.REST):
            yield from self._give_back()
        if not self.calls:
            yield from self._speech.finish()

    def _read(self, *, last: bool) -> Iterator[Piece]:
        """Read as far as the text has come: each step takes some of it, or changes the state, or waits for more."""
        while self._text:
            before = self._state, len(self._text)
            match self._state:
                case _State.START:
                    yield from self._read_start(last)
                case _State.CONTENT:
                    yield from self._read_content(last)
                case _State.BETWEEN:
                    yield from self._read_between(last)
                case _State.HEAD:
                    yield from self._read_head(last)
                case _State.ARGUMENTS:
                    yield from self._read_arguments()
                case _State.REST:
                    self._take(self._scan.take(self._text))
                    self._state = _State.BETWEEN if self._scan.is_complete else _State.REST
                case _State.OBJECT:
                    yield from self._read_object()
            if (self._state, len(self._text)) == before:
                return

    def _read_start(self, last: bool) -> Iterator[Piece]:
        text = self._text.lstrip()
        yield from self._speech.say(self._take(len(self._text) - len(text)))
        opening = self._form.marker or PYTHON_TAG
        if text.startswith(opening):
            self._unclaimed.append(self._take(len(opening)))
            self._state = _State.BETWEEN
        elif text.startswith("{") and not self._form.marker:
            self._state = _State.BETWEEN
        elif last or not opening.startswith(text):
            self._state = _State.CONTENT

    def _read_content(self, last: bool) -> Iterator[Piece]:
        marker = "" if self._only_at_start else self._form.marker
        place = self._text.find(marker) if marker else -1
        if place < 0:
            yield from self._speech.say(self._take(len(self._text) - (0 if last else _undecided(self._text, marker))))
            return
        yield from self._speech.say(self._take(place))
        self._unclaimed.append(self._take(len(marker)))
        self._state = _State.BETWEEN

    def _read_between(self, last: bool) -> Iterator[Piece]:
        self._unclaimed.append(self._take(len(self._text) - len(self._text.lstrip(SEPARATORS))))
        if self._text.startswith("{"):
            self._state, self._scan = _State.HEAD, JsonScan()
            return
        markers = [marker for marker in (self._form.end_marker, self._form.marker) if marker]
        for marker in markers:
            if self._text.startswith(marker):
                self._unclaimed.append(self._take(len(marker)))
                if marker == self._form.end_marker:
                    yield from self._give_back(but=marker)
                return
        if self._text and (last or not any(marker.startswith(self._text) for marker in markers)):
            yield from self._give_back()

    def _read_head(self, last: bool) -> Iterator[Piece]:
        head = _HEAD.match(self._text)
        name = None if head is None else load_json(head["name"])
        if head is not None and is_name(name):
            self._scan.take(self._take(head.end()))
            yield self._begin(str(name))
            self._arguments, self._arguments_scan = [], JsonScan()
            self._state = _State.ARGUMENTS
        elif head is not None or last or len(self._text) > MAX_HEAD or _ends(self._text):
            self._state = _State.OBJECT

    def _read_arguments(self) -> Iterator[Piece]:
        taken = self._take(self._arguments_scan.take(self._text))
        self._scan.take(taken)
        self._arguments.append(taken)
        yield CallArguments(self.calls - 1, taken)
        if self._arguments_scan.is_complete:
            self._whole += isinstance(load_json("".join(self._arguments)), dict)
            self._state = _State.REST

    def _read_object(self) -> Iterator[Piece]:
        self._object.append(self._take(self._scan.take(self._text)))
        if not self._scan.is_complete:
            return
        calls = read_calls(load_json("".join(self._object)))
        if calls is None:
            yield from self._give_back()
            return
        for name, arguments in calls:
            yield self._begin(name)
            yield CallArguments(self.calls - 1, arguments)
            self._whole += 1
        self._state = _State.BETWEEN

    def _begin(self, name: str) -> CallBegun:
        self._speech.drop_space()
        self._unclaimed.clear()
        self._object.clear()
        self.calls += 1
        return CallBegun(self.calls - 1, new_call_id(self._form), name)

    def _give_back(self, *, but: str = "") -> Iterator[Piece]:
        """Go on with content, which what has led to no call is too. White space and what ends a call say nothing."""
        said = "".join([*self._unclaimed, *self._object])
        self._unclaimed.clear()
        self._object.clear()
        self._state = _State.CONTENT
        if said.strip(SEPARATORS).removesuffix(but):
            yield from self._speech.say(said)

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken


def _undecided(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins the marker."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)


def _ends(text: str) -> bool:
    scan = JsonScan()
    scan.take(text)
    return scan.is_complete
