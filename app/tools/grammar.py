"""Grammars that hold a turn to calls of tools, after its thoughts if the model thinks, in llguidance's dialect of Lark.

Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from app.domain.values import Grammar, GrammarKind
from app.grammars.schemas import NAMED, VALUES, without_silent
from app.tools.calls import types_of
from app.tools.definitions import Tool, ToolMode, ToolUse
from app.tools.formats import HARMONY, IS_TEXT, Thinking, ToolFormat, told
from app.tools.lark import PREFIX, START
from app.tools.thinking import Opening

MAX_CALLS = 16
"""A small model that must call tools would go on for ever."""

INPUT = '{"input": "'
INPUT_END = '"}'
"""Around the text of a custom tool's call."""

ANY_TEXT = r"/(.|\n)*/"
CALL_ALONE = r"[\s\x1c-\x1f]*(<\|python_tag\|>)?\{"
"""Begins an answer that is read as a call where there is no marker."""

SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Models write JSON so. Free white space is where a small model would stay for ever."""

_OPEN = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
)
"""Keywords by which a schema takes more keys than its `properties`, or may."""

ANY_OBJECT = {"type": "object", "additionalProperties": True}

_ROOT, _REFERRED = "arguments", re.compile(r'"\$ref": "#/?([^"/]*)')
"""The name of a whole schema among its definitions, and what finds the keywords of it that others refer to."""
_FOREIGN = frozenset(
    {
        *("propertyNames", "uniqueItems", "not", "if", "then", "else", "dependentRequired", "dependentSchemas"),
        *("dependencies", "contains", "minContains", "maxContains", "unevaluatedItems"),
        "unevaluatedProperties",
    }
)
"""Keywords that llguidance does not know. A schema without them only takes more."""
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
"""Formats of texts that it knows."""

Literal = Callable[[str], str]
"""Writes a text as terminals: a marker that is a token is one that no text can spell."""
TokenId = Callable[[str], int | None]
"""Gives the token that a marker is; None: it is written as any text."""


def literals(markers: Iterable[str], token_id: TokenId) -> tuple[Literal, dict[str, int]]:
    """What writes a text of which some markers are tokens, and those tokens."""
    known = ((marker, token_id(marker)) for marker in sorted(markers, key=len, reverse=True))
    ids = {marker: found for marker, found in known if found is not None}
    cut = re.compile(f"({'|'.join(map(re.escape, ids))})") if ids else None

    def literal(text: str) -> str:
        parts = [text] if cut is None else cut.split(text)
        return " ".join(f"<[{ids[part]}]>" if part in ids else _text(part) for part in parts if part)

    return literal, ids


def call_grammar(
    use: ToolUse,
    form: ToolFormat,
    token_id: TokenId,
    *,
    content_schema: Mapping[str, Any] | None = None,
    answer: str = "",
) -> str:
    """The grammar of a turn that may call tools.

    `content_schema` is the JSON Schema of an answer that calls none; None: any text. `answer` begins such an answer.
    """
    literal, ids = literals(form.markers, token_id)
    repeats = form.can_repeat and use.parallel
    tools = [(tool, use.holds(tool, has_form=content_schema is not None)) for tool in use.callable]
    rules = list(_call_rules(tools, form, literal))
    more = f"({literal(form.separator)} {literal(form.before)} call){{0,{MAX_CALLS - 1}}}" if repeats else ""
    calls = f"calls: {literal(form.opening)} {literal(form.before)} call {more} {literal(form.closing)}"
    if use.mode is ToolMode.REQUIRED:
        return "\n".join(["start: calls", calls, *rules])
    if content_schema is not None:
        said = f"answer: {literal(answer)} {_json(content_schema)}"
        return "\n".join(["start: calls | answer", said, calls, *rules])
    if answer:
        said = f"answer: {literal(answer)} TEXT"
        return "\n".join(["start: calls | answer", said, f"TEXT: {ANY_TEXT}", calls, *rules])
    if not form.marker:
        return "\n".join(["start: call | TEXT", f"TEXT: {ANY_TEXT} & ~/{CALL_ALONE}(.|\\n)*/", *rules])
    return "\n".join([*_after_text(form, literal, form.marker in ids, repeats=repeats), *rules])


def _call_rules(tools: Sequence[tuple[Tool, bool]], form: ToolFormat, literal: Literal) -> Iterator[str]:
    """A `call`, from what names it on. Each tool comes with whether it is held to its schema."""
    yield "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))
    for index, (tool, held) in enumerate(tools):
        head, tail = form.write_head(json.dumps(tool.name)), form.tail + form.after
        schema = held_schema(tool) if held else ANY_OBJECT
        lark = tool.lark if form.pair is None else tool.plain_lark
        text = ANY_TEXT
        if lark is not None:
            prefix = f"TEXT{index}_"
            text = START.replace(PREFIX, prefix)
            yield lark.replace(PREFIX, prefix)
        if form.pair is not None:
            yield f"call_{index}: {literal(head)} pairs_{index} {literal(tail)}"
            yield from _pair_rules(f"pairs_{index}", schema, form.pair, literal, text)
        elif lark is not None:
            yield f"call_{index}: {literal(head)} {_text(INPUT)} {text} {_text(INPUT_END)} {literal(tail)}"
        else:
            yield f"call_{index}: {literal(head)} {_json(_closed(schema))} {literal(tail)}"


def _pair_rules(
    name: str, schema: Mapping[str, Any], pair: tuple[str, str, str], literal: Literal, text: str
) -> Iterator[str]:
    """Parameters that are no JSON, in the order of the schema: texts, which match the terminal `text`, as they are, and
    the JSON of anything else. The compiler gets an invalid schema as it is, and refuses it.
    """
    begin, middle, end = pair
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        yield f"{name}: {_json(schema)}"
        return
    named = set(_REFERRED.findall(json.dumps(schema)))
    root = {key: value for key, value in schema.items() if key in named or "" in named}
    shared = {"$defs": {_ROOT: _below(root)}}
    any_text = f"{name}_text"
    before, token, after = literal(end).partition("<[")
    if token:
        yield f"{any_text}: {name.upper()}_TEXT {token}{after}"
        yield f"{name.upper()}_TEXT: {text} {before}"
    else:
        yield f"{any_text}[lazy]: {text} {_text(end)}"
    parts = []
    for index, (key, each) in enumerate(properties.items()):
        rule = f"{name}_{index}"
        parts.append(rule if key in required else f"{rule}?")
        choices = each.get("enum", [each.get("const")]) if isinstance(each, dict) else None
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            value = f"({' | '.join(map(_text, choices))}) {literal(end)}"
        elif not isinstance(each, dict) or "string" in types_of(each) or not types_of(each):
            value = any_text
        else:
            value = f"{_json({**_below(each), **shared} if '$ref' in json.dumps(each) else each)} {literal(end)}"
        is_text = not value.startswith("%json")
        yield f"{rule}: {literal(f'{begin}{key}{told(middle, is_text=is_text)}')} {value}"
    if not properties and not _OPEN.isdisjoint(schema):
        value = f"{literal(told(middle, is_text=True))} {any_text}"
        if IS_TEXT in middle:
            value = f"({value} | {literal(told(middle, is_text=False))} {_json({})} {literal(end)})"
        yield f"{name}_any: {literal(begin)} /[A-Za-z0-9_.-]+/ {value}"
        parts = [f"{name}_any*"]
    yield f"{name}: {' '.join(parts)}" if parts else f'{name}: ""'


def _below(schema: Any) -> Any:
    """A schema whose references are to a schema that is one of its definitions, and no longer the whole."""
    if isinstance(schema, list):
        return [_below(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    below = {key: value if key in VALUES else _below(value) for key, value in schema.items()}
    for key in NAMED.intersection(schema):
        if isinstance(schema[key], dict):
            below[key] = {name: _below(each) for name, each in schema[key].items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        below["$ref"] = f"#/$defs/{_ROOT}{reference[1:]}"
    return below


def _after_text(form: ToolFormat, literal: Literal, is_token: bool, *, repeats: bool) -> list[str]:
    """Free text in which a marker begins calls, and which never holds the marker itself."""
    rest = (form.opening + form.before).removeprefix(form.marker)
    body = f"{literal(rest)} call {literal(form.closing)}"
    start = f"start: marked{{0,{MAX_CALLS}}} TEXT" if repeats else "start: TEXT | marked"
    text = f"TEXT: {ANY_TEXT} & ~({ANY_TEXT} {_text(form.marker)} {ANY_TEXT})"
    if is_token:
        return [start, f"marked: TEXT {literal(form.marker)} {body}", text]
    return [start, f"marked: trigger {body}", f"trigger[lazy]: TEXT {_text(form.marker)}", text]


def any_answer(form: ToolFormat, token_id: TokenId) -> str:
    """The grammar of any answer, in which markers may be tokens."""
    literal, ids = literals(form.markers, token_id)
    channel = f"{literal(form.marker)} /final|commentary/" if form is HARMONY else ""  # and no thoughts
    more = " | ".join(["TEXT", *(f"<[{each}]>" for each in ids.values())])
    return f"start: {channel} ({more})*\nTEXT: /(.|\\n)+/"


def after_thinking(
    grammar: str, form: Thinking, opening: Opening, token_id: TokenId, *, budget: int | None = None, is_answer: bool
) -> str:
    """The grammar of an answer that is held to `grammar` once the model has thought, if it thinks.

    - `budget`: the thoughts end after so many tokens. It needs an end that is a token.
    - `is_answer`: it is that of a text, which may have a beginning of its own.
    """
    if opening is Opening.CLOSED:
        return grammar
    literal, _ = literals(form.markers, token_id)
    begun = grammar.removeprefix("start:").strip()
    said = literal(form.answer) if is_answer else ""
    end = literal(form.end)
    spaces = "" if form.answer or budget is not None else r"/\n?\n?/"
    if end.startswith("<["):
        limit = "" if budget is None else f"[max_tokens={budget}]"
        thought = f"thought{limit}: THOUGHT\nTHOUGHT: {ANY_TEXT} & ~({ANY_TEXT} {_text(form.end)} {ANY_TEXT})"
        close = f"close: thought {end} {spaces}"
    else:
        thought = f"thought[lazy]: {ANY_TEXT} {_text(form.end)}"
        close = f"close: thought {spaces}"
    thinks = "close" if opening is Opening.OPEN else f"({literal(form.open)} close)?"
    return f"start: {thinks} {said} begun\n{close}\n{thought}\nbegun: {begun}"


def plain_grammar(grammar: Grammar) -> str:
    """A client's grammar in the dialect of Lark. Raises ValueError or TypeError for a schema that is no JSON object."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"start: {_json(json.loads(grammar.text))}"
        case GrammarKind.REGEX:
            escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", grammar.text)
            return f"start: FORM\nFORM: /{escaped}/"
        case GrammarKind.CHOICE:
            return f"start: FORM\nFORM: {' | '.join(json.dumps(choice) for choice in json.loads(grammar.text))}"
        case GrammarKind.LARK:
            return f"start: %lark {{\n{grammar.text}\n}}"


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without arguments that it does not name, unless it says something about them.

    A function fails on them, and a small model would add them until its tokens run out.
    """
    if "properties" not in schema or not _OPEN.isdisjoint(schema):
        return schema
    return {**schema, "additionalProperties": False}


def held_schema(tool: Tool) -> dict[str, Any]:
    """What holds the arguments of a tool: its schema `without_silent` keywords, and unless the tool is strict, without
    those that llguidance does not know. A value whose schema is none may be any.
    """
    return _held(without_silent(tool.schema), [], "", strict=tool.strict)


def foreign_keywords(tool: Tool) -> list[str]:
    """The keywords that `held_schema` leaves out although they say something, and the values whose schemas are none, by
    their dotted paths.
    """
    foreign = list[str]()
    _held(without_silent(tool.schema), foreign, "", strict=tool.strict)
    return foreign


def _held(schema: Mapping[str, Any], foreign: list[str], path: str, *, strict: bool) -> dict[str, Any]:
    def known(each: Any, name: str) -> Any:
        return _held(each, foreign, f"{name}.", strict=strict) if isinstance(each, dict) else each

    def named(each: Any, name: str) -> Any:
        if isinstance(each, dict | bool):
            return known(each, name)
        foreign.append(name)
        return {}

    held: dict[str, Any] = {}
    for key, value in schema.items():
        name = path + key
        is_unknown = key == "format" and value not in _FORMATS and "string" in (types_of(schema) or ("string",))
        if (key in _FOREIGN or is_unknown) and not strict:
            foreign.append(name)
            if key == "unevaluatedProperties" and value is not False:
                held.setdefault("additionalProperties", True)
        elif key in VALUES:
            held[key] = value
        elif key in NAMED and isinstance(value, dict):
            held[key] = {inner: named(each, f"{name}.{inner}") for inner, each in value.items()}
        elif isinstance(value, list):
            held[key] = [known(each, f"{name}.{index}") for index, each in enumerate(value)]
        else:
            held[key] = known(value, name)
    return held


def with_spaces(schema: Mapping[str, Any]) -> str:
    """A JSON schema as calls are held to it."""
    return json.dumps({"x-guidance": SPACES, **schema})


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {with_spaces(schema)}"


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
