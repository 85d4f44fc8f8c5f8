"""Answers in the format of a model's family, read as they come."""

import json
import math
import re
import secrets
import string
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NoReturn

from app.domain.text import whole_characters, whole_escapes
from app.domain.values import FinishReason
from app.messages import TurnFinished
from app.text.generation import TextChunk
from app.tools.definitions import Tool
from app.tools.formats import PYTHON_TAG, ToolFormat

_ID_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of what the model thinks before it answers."""

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


Piece = Content | Reasoning | CallBegun | CallArguments


class AnswerReader:
    """Reads one answer as it comes. Text that is no call that can be read is content, so that nothing is lost.

    No text makes it raise, and each character costs the same, however long the answer is.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        *,
        only_at_start: bool = False,
        only_calls: bool = False,
        is_held: bool = False,
        whole_markers: bool = False,
        at_once: bool = False,
    ) -> None:
        """`tools` may be called; a call of any other is content.

        - `only_at_start`: an answer that does not begin with a call has none, whatever it says.
        - `only_calls`: the answer's grammar allows nothing else. If it is cut, its end is markup and no content.
        - `is_held`: a grammar makes all calls whole: no piece has to wait, and no call is quoted.
        - `whole_markers`: the model writes each marker as one token: then the beginning of one is text, even where the
          answer is cut.
        - `at_once`: nobody reads the answer before its end, so no call is told before its arguments have ended.
        """
        self._tools = {tool.name: tool for tool in tools}
        self._only_at_start = only_at_start
        self._only_calls = only_calls
        self._is_held = is_held or only_calls
        self._whole_markers = whole_markers
        self._at_once = at_once
        self._text = ""
        """What has not been read."""
        self.calls = 0
        self._stop: str | None = None
        """The stop string that has ended the text."""
        self._is_cut = False
        """Whether the last call is no call to its end."""

    @property
    def is_whole(self) -> bool:
        """Whether there are calls, and the arguments of each are a JSON object to its end."""
        return self.calls > 0 and not self._is_cut

    def push(self, text: str) -> Iterator[Piece]:
        """Take the next text."""
        self._text += text
        return self._told(self._read(last=False))

    def finish(self, *, cut: bool = False, stop: str | None = None) -> Iterator[Piece]:
        """What is left when no more text comes. `cut`: the model had not ended, so the beginning of a call is none of
        the content. Nor is a call in which a `stop` string has ended the text, but one that lacks no more than what
        marks its end is whole.
        """
        self._stop = stop
        return self._told(self._finish(cut))

    def _told(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        return (piece for piece in pieces if not (self._only_calls and isinstance(piece, Content)))

    def _read(self, *, last: bool) -> Iterator[Piece]:
        """Read as far as the text has come; if it is the `last`, nothing waits for more."""
        raise NotImplementedError

    def _finish(self, cut: bool) -> Iterator[Piece]:
        raise NotImplementedError

    def _call(self, form: ToolFormat, name: str, arguments: str) -> Iterator[Piece]:
        """The next call, with the arguments that there are."""
        self.calls += 1
        yield CallBegun(self.calls - 1, new_call_id(form), name)
        if arguments:
            yield CallArguments(self.calls - 1, arguments)

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken


class ThinkingReader(AnswerReader):
    """An `AnswerReader` of a model that thinks."""

    def __init__(self, tools: Sequence[Tool] = (), **options: bool) -> None:
        super().__init__(tools, **options)
        self._taken = 0
        """Bytes of UTF-8 that have been read."""
        self._end = 0
        """Those up to the end of the thoughts."""
        self.content_start: int | None = None
        """Bytes of UTF-8 of the text before the content; None: it has not begun."""

    @property
    def is_thinking(self) -> bool:
        """Whether all that has been read are thoughts, or may yet turn out to be."""
        raise NotImplementedError

    @property
    def thought_bytes(self) -> int | None:
        """Bytes of UTF-8 of the text up to the end of its thoughts; None: they go on."""
        raise NotImplementedError

    def _take(self, length: int) -> str:
        taken = super()._take(length)
        self._taken += len(taken.encode(errors="surrogatepass"))
        return taken


class Answer:
    """One answer as every API tells it: what the model thinks, says and calls, piece by piece."""

    def __init__(
        self,
        reader: AnswerReader | None = None,
        token_bytes: Callable[[int], int] = lambda token_id: 0,
        end_id: int | None = None,
    ) -> None:
        """`reader` finds the calls; None: there are no tools, and all of the answer is content. The thoughts of a
        `ThinkingReader` end with the token `end_id`; if no token stands for their end, `token_bytes`, which gives the
        bytes of text of a token, tells where that is.
        """
        self._reader = reader
        self._thoughts = reader if isinstance(reader, ThinkingReader) else None
        self._token_bytes = token_bytes
        self._end_id = end_id
        self._bytes = 0
        self._end_bytes = 0
        self._ended = 0
        """Tokens up to the last end of thoughts."""
        self._called: list[str] = []
        self.reasoning_tokens = 0
        """Tokens up to the end of the thoughts, with what marks them; while the model thinks, all of them."""
        self.tokens_before_content = 0
        """Tokens before the content: the `reasoning_tokens`, and what stands between."""
        self._starts: list[int] = []
        """Where each token begins, in bytes of the text, as long as the model thinks."""
        self._ends: list[int] = []
        """How many tokens there were at each `end_id`."""
        self.stop: str | None = None
        """The stop string that ended it."""

    def pieces(self, item: TextChunk | TurnFinished) -> list[Piece]:
        """What the turn's next item says."""
        pieces: Iterable[Piece]
        if isinstance(item, TextChunk):
            self.stop = item.stop
            pieces = self._reader.push(item.text) if self._reader else [Content(item.text)]
        else:
            cut = item.reason is not FinishReason.STOP
            pieces = self._reader.finish(cut=cut, stop=self.stop) if self._reader else ()
        was_thinking = self._thoughts is not None and self._thoughts.is_thinking
        found = list(pieces)
        self._called += [piece.name for piece in found if isinstance(piece, CallBegun)]
        if self._thoughts is not None and was_thinking:
            self._count(self._thoughts, item.token_ids if isinstance(item, TextChunk) else ())
        return found

    def _count(self, thoughts: ThinkingReader, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._starts.append(self._bytes)
            self._bytes += self._token_bytes(token_id)
            if token_id == self._end_id:
                self._ends.append(len(self._starts))
        end = thoughts.thought_bytes
        if end is None:
            self.reasoning_tokens = len(self._starts)
        else:
            if end != self._end_bytes:
                marked = bisect_right(self._ends, self._ended)
                self._ended = self._ends[marked] if marked < len(self._ends) else bisect_left(self._starts, end)
                self._end_bytes = end
            self.reasoning_tokens = self._ended
        start, before = thoughts.content_start, 0
        if start is not None and end is not None:
            # From the end of the thoughts on: bytes of theirs that make no character have others in the text.
            after = self._starts[self._ended] if self._ended < len(self._starts) else self._bytes
            before = bisect_right(self._starts, after + start - end) - 1
        self.tokens_before_content = max(self.reasoning_tokens, before)

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


def read_calls(found: object, names: Container[str], *, bare: bool = False) -> list[tuple[str, str]] | None:
    """Names and arguments, as texts of JSON, of one call or a list of them; None if it is something else.

    `names` are the tools. Arguments may be a JSON text that holds the object, as some families write them, or left
    out: `bare` calls, which nothing marks, must have some.
    """
    calls = []
    for each in found if isinstance(found, list) else [found]:
        call: Any = each.get("function", each) if isinstance(each, dict) else {}
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in names:
            return None
        if bare and call.keys().isdisjoint({"arguments", "parameters"}):
            return None
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str) and arguments.strip():
            arguments = load_whole(arguments.strip())
        elif arguments is None or isinstance(arguments, str):
            arguments = {}
        if not isinstance(arguments, dict):
            return None
        try:
            calls.append((name, write_json(arguments)))
        except ValueError:
            return None
    return calls or None


def write_json(value: object) -> str:
    """The JSON text of what a model wrote in any form. Raises ValueError if a number in it is not finite."""
    return whole_characters(json.dumps(value, allow_nan=False))


def load_json(text: str, *, huge: bool = False) -> object:
    """The value that a model wrote in strict JSON, None if it is none: any text may come. Unless `huge`, numbers too
    large for a double are none: many clients cannot read them.
    """
    try:
        value: object = json.loads(text, parse_constant=_refuse, parse_float=float if huge else _finite)
    except (ValueError, RecursionError):
        return None
    return value


def load_whole(text: str) -> object:
    """As `load_json`, of an object or a list in which small models may have left line breaks in strings, or closed a
    bracket too many. None if anything else follows: then it has not ended where it seemed to.
    """
    length, strict = JsonScan().take(text)
    return None if text[length:].strip(SURPLUS) else load_json(strict)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse(text)


class JsonScan:
    """Follows brackets and strings. Whether the object is valid, only reading it shows."""

    def __init__(self) -> None:
        self.depth = 0
        """Brackets that are open."""
        self._in_string = False
        self._escaped = False
        self._open = ""
        """The escape that the last text ended in, as `whole_escapes` says."""

    def take(self, text: str, floor: int = 0) -> tuple[int, str]:
        """How many characters of `text` there are until only `floor` brackets are open, and their strict JSON: small
        models write line breaks and tabs into strings as they are, and halves of surrogate pairs.
        """
        strict, start = [self._open], 0
        for index, character in enumerate(text):
            if (self._in_string or self._escaped) and character < " ":
                strict += [text[start:index], "\\" * self._escaped, json.dumps(character)[1:-1]]
                start, self._escaped = index + 1, False
            elif self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth <= floor:
                    text = text[: index + 1]
                    break
        written, self._open = whole_escapes("".join([*strict, text[start:]]))
        return len(text), written


MAX_HEAD = 300
"""Characters within which a call of the usual form begins its arguments."""
MAX_HELD = 2000
"""Characters of arguments that wait for their end, so that what turns out to be no JSON object stays in the content."""
SURPLUS = " \t\r\n}]"
"""What may follow JSON and say nothing."""
SPACES = " \t\r\n,;"
SEPARATORS = SPACES + "[]"
"""What may stand between calls."""
QUOTE = "`"
"""Before a marker: the model tells of calls, and makes none."""
_HEAD = re.compile(r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

_NAME = re.compile(r"(?P<name>[^\s{\[]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
"""What Mistral's newer tokenizers write after the marker, before the object of the arguments."""


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
    """After the arguments of a call, as long as it is not sure that they have ended."""
    BROKEN = auto()
    """In a call that has been told, and whose arguments turned out to be no JSON."""
    OBJECT = auto()
    """In an object that does not begin as a call of a tool does."""


class FamilyReader(AnswerReader):
    """An `AnswerReader`. Arguments come as the model wrote them where a call has its usual form: at once when they end,
    or piece by piece if they are long.
    """

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], **options: bool) -> None:
        super().__init__(tools, **options)
        self._form = form
        self._ends_of_calls = tuple(marker for marker in (form.end_marker, form.marker) if marker)
        self._only_at_start = self._only_at_start or not form.marker
        self._state = _State.START if self._only_at_start else _State.CONTENT
        self._unclaimed: list[str] = []
        """What has been read since the content or the last call ended: it is content if no call follows."""
        self._object: list[str] = []
        """The object that is read, as the model wrote it, until it is told as a call."""
        self._json: list[str] = []
        """Of that object or its arguments, strict JSON."""
        self._scan = JsonScan()
        self._floor = 0
        """Brackets that are open around the arguments."""
        self._last = ""
        """The bracket that ends them, until that is sure."""
        self._name = ""
        self._is_told = False
        """Whether the call whose arguments are read has been told."""
        self._may_be_call = True
        """Whether the object that is read can still turn out to be a call."""
        self._is_quoted = False
        """Whether the content ends with a quotation mark."""
        self._speech = Speech()
        self._whole = 0

    @property
    def is_whole(self) -> bool:
        return 0 < self.calls == self._whole

    def _finish(self, cut: bool) -> Iterator[Piece]:
        is_stopped = self._stop is not None
        cut = cut or is_stopped
        is_text = self._state in (_State.START, _State.CONTENT) and (self._whole_markers or is_stopped)
        yield from self._read(last=not cut or is_text)
        if self._state is _State.REST:  # and nothing has spoken against it
            is_sure = self._length_of_rest(last=True) != -1 if is_stopped else not cut
            yield from self._end_call(len(self._text), is_sure=self._is_held or is_sure)
        self._object.append(self._text)
        if self._state is _State.BROKEN or (self._state is _State.ARGUMENTS and (cut or self._is_told)):
            if not self._is_told:
                yield from self._tell("".join(self._json))
        elif cut and self._begins_call():
            if any([*self._unclaimed, *self._object]):
                self._speech.drop_space()
        else:
            yield from self._give_back()
        if not self.calls:
            yield from self._speech.finish()

    def _begins_call(self) -> bool:
        """Whether what was read last is the beginning of a call. What no marker shows may be an answer in JSON."""
        if self._state is _State.OBJECT and not self._may_be_call:
            return False
        text = "".join([*self._unclaimed, *self._object])
        if self._form.marker or not text.lstrip().startswith("{"):
            return True
        squeezed = "".join(text.split())
        named = [f'{{"name":{"".join(json.dumps(name).split())},"' for name in self._tools]
        heads = [head + key for head in named for key in ('arguments":', 'parameters":')]
        heads += ['{"type":"function","', '{"function":{"']
        return any(squeezed.startswith(head) or head.startswith(squeezed) for head in heads)

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
                    yield from self._read_rest(last)
                case _State.BROKEN:
                    yield from self._read_broken(last)
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
            yield from self._say(len(self._text) - (0 if last else undecided(self._text, marker)))
            return
        yield from self._say(place)
        if self._is_quoted and not self._is_held:
            yield from self._say(len(marker))
            return
        self._unclaimed.append(self._take(len(marker)))
        self._state = _State.BETWEEN

    def _say(self, length: int) -> Iterator[Piece]:
        if length:
            self._is_quoted = self._text[length - 1] == QUOTE
            yield from self._speech.say(self._take(length))

    def _read_between(self, last: bool) -> Iterator[Piece]:
        self._unclaimed.append(self._take(len(self._text) - len(self._text.lstrip(SPACES))))
        text = self._text
        if text.startswith("{"):
            self._begin_object(_State.HEAD)
            return
        markers = self._ends_of_calls
        for marker in markers:
            if text.startswith(marker):
                self._unclaimed.append(self._take(len(marker)))
                if marker == self._form.end_marker:
                    yield from self._give_back(but=marker)
                return
        named = _NAME.match(text) if self._form.has_names else None
        if not text or (not last and (any(marker.startswith(text) for marker in markers) or self._may_be_name(text))):
            return
        if text[0] in SEPARATORS:
            self._unclaimed.append(self._take(1))
        elif named is not None and named["name"] in self._tools:
            self._begin_object(_State.HEAD)
            yield from self._read_name(named, named["name"])
        else:
            yield from self._give_back()

    def _may_be_name(self, text: str) -> bool:
        """Whether more text can make it the head of a call without an object around it."""
        names = self._tools if self._form.has_names and "{" not in text and len(text) <= MAX_HEAD else ()
        return any(name.startswith(text) or text.startswith(name) for name in names)

    def _begin_object(self, state: _State) -> None:
        self._state, self._scan, self._json, self._floor = state, JsonScan(), [], 0
        self._is_told, self._may_be_call, self._last = False, True, ""

    def _read_head(self, last: bool) -> Iterator[Piece]:
        head = _HEAD.match(self._text)
        name = None if head is None else load_json(head["name"])
        if head is not None:
            yield from self._read_name(head, name)
        elif last or len(self._text) > MAX_HEAD or _ends(self._text):
            self._state = _State.OBJECT

    def _read_name(self, head: re.Match[str], name: object) -> Iterator[Piece]:
        """Take all before the arguments. The object of another name than a tool's is read too, but as content."""
        self._scan.take(head[0])
        self._floor = max(0, self._scan.depth)
        self._object.append(self._take(head.end()))
        if not isinstance(name, str) or name not in self._tools:
            self._state, self._may_be_call = _State.OBJECT, False
            return
        self._name, self._state = name, _State.ARGUMENTS
        if self._is_held:
            yield from self._tell("")

    def _read_arguments(self) -> Iterator[Piece]:
        length, strict = self._scan.take(self._text, self._floor)
        taken = self._take(length)
        ends = self._scan.depth <= self._floor
        self._json.append(strict)
        readable = ends and isinstance(load_json("".join(self._json), huge=self._is_told), dict)
        if readable:
            self._state, self._last = _State.REST, strict[-1]
        if self._is_told:
            yield CallArguments(self.calls - 1, strict.removesuffix(self._last) if readable else strict)
        else:
            self._object.append(taken)
            if not self._at_once and sum(map(len, self._json)) > MAX_HELD:
                yield from self._tell("".join(self._json).removesuffix(self._last))
        if ends and not readable:
            yield from self._break()

    def _read_rest(self, last: bool) -> Iterator[Piece]:
        """A quotation mark within a string looks as if it ended the string, and a bracket behind it as if it ended the
        arguments. What follows shows it: a call with half of its arguments is none.
        """
        length = self._length_of_rest(last)
        if length is None and len(self._text) > MAX_HEAD:
            length = -1 if self._text.strip(SURPLUS) else len(self._text)
        if length == -1:
            yield from self._break()
        elif length is not None:
            yield from self._end_call(length)

    def _length_of_rest(self, last: bool) -> int | None:
        """Characters of the call after its arguments; -1: they have not ended. None: more text tells it."""
        text, is_open = self._text.lstrip(), self._floor > 0
        if is_open and text.startswith((",", "}")):  # else its object lacks the last bracket
            scan, is_open = JsonScan(), False
            scan.depth = self._floor
            length, strict = scan.take(text)
            if scan.depth > 0 and not last:
                return None
            if load_json('{"":0' + strict) is None:
                return -1
            text = text[length:]
        text = text.lstrip(SURPLUS)
        goes_on = text.lstrip(SPACES)
        if not goes_on:
            return len(self._text) if last else None
        length = len(self._text) - len(text)
        if goes_on.startswith(self._ends_of_calls):
            return length
        if not last and any(marker.startswith(goes_on) for marker in self._ends_of_calls):
            return None
        # No bracket around the arguments tells where they end: nothing else may follow in the line.
        is_closed = not is_open if self._floor else goes_on[0] == "<" or "\n" in self._text[:length]
        return length if is_closed and goes_on[0] != '"' else -1

    def _end_call(self, length: int, *, is_sure: bool = True) -> Iterator[Piece]:
        """The arguments have ended, and so does the call after so many characters, unless what is cut off says more."""
        if self._is_told:
            yield CallArguments(self.calls - 1, self._last)
        else:
            yield from self._tell("".join(self._json))
        self._take(length)
        self._whole += is_sure
        self._state = _State.BETWEEN

    def _break(self) -> Iterator[Piece]:
        """The arguments have not ended where they seemed to: it is no call, or one that no client can read."""
        if self._is_told:
            yield CallArguments(self.calls - 1, self._last)
            self._state = _State.BROKEN
        elif self._scan.depth > 0:
            self._state, self._may_be_call = _State.OBJECT, False
        else:
            yield from self._give_back()

    def _read_broken(self, last: bool) -> Iterator[Piece]:
        """All up to a marker, so that the arguments are no JSON for the client either."""
        places = [self._text.find(marker) for marker in self._ends_of_calls if marker in self._text]
        waits = 0 if last else max((undecided(self._text, marker) for marker in self._ends_of_calls), default=0)
        if said := self._take(min(places, default=len(self._text) - waits)):
            yield CallArguments(self.calls - 1, said)
        if places:
            self._state = _State.BETWEEN

    def _read_object(self) -> Iterator[Piece]:
        length, strict = self._scan.take(self._text)
        self._object.append(self._take(length))
        self._json.append(strict)
        if self._scan.depth > 0:
            return
        bare = not self._form.marker
        calls = read_calls(load_json("".join(self._json)), self._tools, bare=bare) if self._may_be_call else None
        if calls is None:
            yield from self._give_back()
            return
        for self._name, arguments in calls:
            yield from self._tell(arguments)
            self._whole += 1
        self._state = _State.BETWEEN

    def _tell(self, arguments: str) -> Iterator[Piece]:
        """Begin the call with the arguments that there are."""
        self._speech.drop_space()
        self._unclaimed.clear()
        self._object.clear()
        self._is_told = True
        yield from self._call(self._form, self._name, arguments)

    def _give_back(self, *, but: str = "") -> Iterator[Piece]:
        """Go on with content, which what has led to no call is too. White space and what ends a call say nothing."""
        said = "".join([*self._unclaimed, *self._object])
        self._unclaimed.clear()
        self._object.clear()
        self._state, self._is_quoted = _State.CONTENT, said.endswith(QUOTE)
        if said.strip(SEPARATORS).removesuffix(but):
            yield from self._speech.say(said)


def undecided(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins the marker, and is not all of it."""
    start = max(0, len(text) - len(marker) + 1)
    while (start := text.find(marker[:1], start)) >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


def _ends(text: str) -> bool:
    scan = JsonScan()
    scan.take(text)
    return scan.depth <= 0
