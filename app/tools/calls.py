"""Calls that a marker begins and another ends, read when they are whole."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from app.grammars.schemas import referred
from app.tools.definitions import Tool
from app.tools.formats import ARGUMENTS, IS_TEXT, NAME, ToolFormat
from app.tools.reader import (
    QUOTE,
    AnswerReader,
    JsonScan,
    Piece,
    Speech,
    load_json,
    load_whole,
    read_calls,
    undecided,
    write_json,
)

Calls = list[tuple[str, str]]
"""Names, each with its arguments as a JSON text."""


def read_call(text: str, form: ToolFormat, tools: Mapping[str, Tool]) -> Calls | None:
    """The calls that stand between the markers of the family; None if they are none of these tools.

    Every family may write the JSON object of a call, too.
    """
    text = text.strip()
    if text[:1] in ("{", "["):
        found = read_calls(load_whole(text), tools)
        if found is not None or not form.is_pythonic:
            return found
    if form.is_pythonic:
        return _pythonic(text, tools)
    head = _call_pattern(form).fullmatch(text)
    tool = None if head is None else tools.get(head["name"])
    if head is None or tool is None:
        return None
    if form.pair is not None:
        pairs = _pairs(head["arguments"], form.pair, tool)
        return None if pairs is None else [(tool.name, write_json(pairs))]
    arguments = head["arguments"]
    if form.text_quote and load_json(arguments) is None:
        arguments = _with_quotes(arguments, form.text_quote)
    return read_calls({"name": tool.name, "arguments": arguments or None}, tools)


@lru_cache
def _call_pattern(form: ToolFormat) -> re.Pattern[str]:
    written = _spaced(form.call.strip()).replace(":0", r":\d+")
    return re.compile(written.replace(NAME, r"(?P<name>[\w.\-]+)").replace(ARGUMENTS, "(?P<arguments>.*)"), re.DOTALL)


def _spaced(text: str) -> str:
    """A pattern of the text, in which any white space matches where the text has some."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))


@lru_cache
def _pair_patterns(pair: tuple[str, str, str]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What begins a parameter, with its name, and what ends it: the next one follows, or nothing."""
    begin, middle, end = pair
    between = _spaced(middle.rstrip()).replace(IS_TEXT, "(?P<is_text>true|false)")
    head = re.compile(rf"\s*{_spaced(begin.strip())}(?P<key>[^<>]*?){between}")
    return head, re.compile(rf"{_spaced(end.strip())}\s*(?={_spaced(begin.strip())}|\Z)")


def _pairs(text: str, pair: tuple[str, str, str], tool: Tool) -> dict[str, object] | None:
    properties = tool.schema.get("properties")
    schemas: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
    begins, ends = _pair_patterns(pair)
    found: dict[str, object] = {}
    place = 0
    while text[place:].strip():
        head = begins.match(text, place)
        end = None if head is None else ends.search(text, head.end())
        if head is None or end is None:
            return None
        value, place = text[head.end() : end.start()], end.end()
        if pair[1].endswith("\n"):
            value = value.removeprefix("\n").removesuffix("\n")
        key = head["key"].strip().strip('"')
        is_text = head.groupdict().get("is_text")
        if is_text == "false":
            schema: object = {"type": ["object", "null"]}  # any JSON
        else:
            schema = schemas.get(key) if is_text is None else {"type": "string"}
        found[key] = _typed(value, schema, tool.schema)
    return found


def _typed(text: str, schema: object, root: object) -> object:
    """A parameter, which is JSON unless its schema says that it is a text."""
    value: Any = {"True": True, "False": False}.get(text.strip(), load_json(text.strip()))
    if not isinstance(schema, dict):
        return text
    types = types_of(schema, root)
    if "null" in types and text.strip() in ("null", "None"):
        return None
    keeps_text = "string" in types or (not types and not isinstance(value, dict | list))
    return text if keeps_text or value is None else value


_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def types_of(schema: object, root: object = None) -> list[Any]:
    """The types that a schema names, in itself, in its parts, in what it refers to in `root`, or by its values."""
    types, left, seen = list[Any](), [schema], set[int]()
    while left:
        each = left.pop()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        parts = [each.get(name) for name in ("anyOf", "oneOf", "allOf")]
        left += [referred(root, each.get("$ref")), *(one for part in parts if isinstance(part, list) for one in part)]
        values = each.get("enum", [each["const"]] if "const" in each else [])
        implied = [_TYPES.get(type(value), "null") for value in values] if isinstance(values, list) else []
        named = each.get("type", implied)
        types += named if isinstance(named, list) else [named]
    return types


def _with_quotes(text: str, quote: str) -> str:
    """The JSON of an object with bare names, and texts in quotes of another kind."""
    parts = text.split(quote)
    parts[::2] = [re.sub(r"([{,]\s*)([\w\-]+)\s*:", r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return "".join(parts)


_WORDS = {"true": True, "false": False, "null": None}
MAX_PYTHON = 1 << 16
"""Characters of calls in Python: their parser takes a hundred times that in memory."""
_STRING = re.compile(r"""('{3}|"{3})(?:\\.|[^\\])*?(?:\1|\\?\Z)|'(?:\\.|[^\\'])*'?|"(?:\\.|[^\\"])*"?""", re.DOTALL)
"""A text in Python, even without its end. Small models write line breaks into it as they are."""
_LINES = re.compile(r"\\.|[\r\n]", re.DOTALL)
_ESCAPED = {"\r": r"\r", "\n": r"\n"}


def _pythonic(text: str, tools: Mapping[str, Tool]) -> Calls | None:
    if len(text) > MAX_PYTHON:
        return None
    text = text if text.startswith("[") else f"[{text}]"
    escaped = _STRING.sub(lambda found: _LINES.sub(lambda each: _ESCAPED.get(each[0], each[0]), found[0]), text)
    for written in (text, escaped):  # a comment may have an apostrophe, which begins no text
        try:
            tree = ast.parse(written, mode="eval").body
            assert isinstance(tree, ast.List)
            return [_python_call(each, tools) for each in tree.elts] or None
        except SyntaxError:
            continue
        except (ValueError, TypeError, AssertionError, MemoryError, RecursionError):
            return None
    return None


def _python_call(call: ast.expr, tools: Mapping[str, Tool]) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name) or call.func.id not in tools:
        raise ValueError("no call of a tool")
    arguments = dict[str, Any]()
    for each in call.keywords:
        value = _python_value(each.value)
        arguments |= value if each.arg is None else {each.arg: value}
    return call.func.id, write_json(arguments)


def _python_value(value: ast.expr) -> Any:
    match value:
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_python_value(each) for each in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {ast.literal_eval(key): _python_value(each) for key, each in zip(keys, values, strict=True) if key}
        case _:
            return ast.literal_eval(value)


MAX_ENDS = 64
"""Of what ends a call, in its own text: the call is read anew at each."""


def _goes_on(text: str, form: ToolFormat) -> bool:
    """Whether a call that cannot be read may be whole with more: its own text may hold what ends a call."""
    if form.pair is not None:
        return text.count(form.pair[0].strip()) > text.count(form.pair[2].strip())
    scan = JsonScan()
    _, brace, rest = text.partition("{")
    scan.take(brace + rest)
    return scan.depth > 0


class CallReader(AnswerReader):
    """An `AnswerReader` of a format whose calls have an end. A call comes when it is whole."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], **options: bool) -> None:
        super().__init__(tools, **options)
        self._form = form
        self._opening, self._closing = form.opening.strip(), form.closing.strip()
        self._markers = [marker for marker in (form.begin, self._opening, self._closing) if marker]
        self._held: list[str] = []
        """What has been read of the call whose end has not come."""
        self._ends = 0
        """How many have been found within it."""
        self._in_call = False
        self._unclaimed: list[str] = []
        """What begins calls, and has led to none yet: it is content if none follows."""
        self._is_quoted = False
        self._speech = Speech()
        self._has_said = False

    def _finish(self, cut: bool) -> Iterator[Piece]:
        yield from self._read(last=not cut or self._whole_markers)
        if self._stop is not None:
            text, ends = "".join([*self._held, self._text]), self._form.end_marker in self._stop
            cut = not self._in_call or not ends or read_call(text, self._form, self._tools) is None
        if self._in_call and not cut:
            self._held.append(self._text)
            self._text = ""
            yield from self._end_call("")
        elif cut and (self._in_call or self._text or self._unclaimed):
            self._is_cut = self._in_call
            self._speech.drop_space()
        else:
            yield from self._give_back("")
        if not self.calls:
            yield from self._speech.finish()

    def _read(self, *, last: bool) -> Iterator[Piece]:
        while self._text:
            if self._in_call:
                place = self._text.find(self._form.end_marker)
                if place < 0:
                    self._hold(len(self._text) - undecided(self._text, self._form.end_marker))
                    return
                self._hold(place)
                self._take(len(self._form.end_marker))
                yield from self._end_call(self._form.end_marker)
                continue
            markers = () if self._only_at_start and self._has_said else self._markers
            found = [(self._text.find(marker), marker) for marker in markers if marker in self._text]
            if not found:
                waits = 0 if last else max((undecided(self._text, marker) for marker in markers), default=0)
                yield from self._say(self._take(len(self._text) - waits))
                return
            place, marker = min(found)
            yield from self._say(self._take(place))
            self._take(len(marker))
            if (self._is_quoted and not self._is_held) or (self._only_at_start and self._has_said):
                yield from self._say(marker)
            elif marker == self._form.begin:
                self._in_call, self._held, self._ends = True, [], 0
            elif marker == self._opening:
                yield from self._give_back("")
                self._unclaimed = [marker]
            elif not self.calls:
                yield from self._give_back(marker)

    def _end_call(self, end: str) -> Iterator[Piece]:
        text = "".join(self._held)
        calls = read_call(text, self._form, self._tools)
        if calls is None and end and self._ends < MAX_ENDS and _goes_on(text, self._form):
            self._held, self._ends = [text + end], self._ends + 1
            return
        self._in_call, self._held = False, []
        if calls is None:
            yield from self._give_back(f"{self._form.begin}{text}{end}")
            return
        self._unclaimed.clear()
        self._speech.drop_space()
        for name, arguments in calls:
            yield from self._call(self._form, name, arguments)

    def _say(self, text: str) -> Iterator[Piece]:
        if not text:
            return
        if self._unclaimed and not text.strip():
            self._unclaimed.append(text)
            return
        yield from self._give_back(text)

    def _give_back(self, text: str) -> Iterator[Piece]:
        """Go on with content, which what has led to no call is too."""
        text = "".join([*self._unclaimed, text])
        self._unclaimed.clear()
        self._has_said = self._has_said or bool(text.strip())
        self._is_quoted = text.endswith(QUOTE) if text else self._is_quoted
        yield from self._speech.say(text)

    def _hold(self, length: int) -> None:
        self._held.append(self._take(length))
