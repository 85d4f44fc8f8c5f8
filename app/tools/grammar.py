"""Grammars that hold a turn to calls of tools, in llguidance's dialect of Lark.

Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.tools.definitions import Tool, ToolFormat, ToolMode, ToolUse
from app.tools.lark import PREFIX, START

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

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values have schemas by names."""
_VALUES = frozenset({"const", "default", "enum", "examples"})
_SILENT: tuple[tuple[str, object], ...] = (
    ("propertyNames", {"type": "string"}),
    ("propertyNames", {}),
    ("uniqueItems", False),
)

Literal = Callable[[str], str]
"""Writes a text as terminals: a special token is one that no text can spell."""


def call_grammar(
    use: ToolUse,
    form: ToolFormat,
    special_id: Callable[[str], int | None],
    *,
    content_schema: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of a turn that may call tools.

    `special_id` gives the token of a marker that only a special token can write, else None. `content_schema` is the
    JSON Schema of an answer that calls none; None: any text.
    """
    marker_id = special_id(form.marker) if form.marker else None

    def literal(text: str) -> str:
        if marker_id is not None and text.startswith(form.marker):
            return f"<[{marker_id}]> {_text(text.removeprefix(form.marker))}".strip()
        return _text(text)

    repeats = form.can_repeat and use.parallel
    texts_only = all(tool.lark is not None for tool in use.callable if tool.strict)
    rules = _call_rules(use.callable, form, held=use.is_narrowed or content_schema is not None or not texts_only)
    more = f"({_text(form.separator)} {literal(form.before)} call){{0,{MAX_CALLS - 1}}}" if repeats else ""
    calls = f"calls: {literal(form.opening)} {literal(form.before)} call {more} {_text(form.closing)}"
    if use.mode is ToolMode.REQUIRED:
        return "\n".join(["start: calls", calls, *rules])
    if content_schema is not None:
        return "\n".join(["start: calls | answer", f"answer: {_json(content_schema)}", calls, *rules])
    if not form.marker:
        return "\n".join(["start: call | TEXT", f"TEXT: {ANY_TEXT} & ~/{CALL_ALONE}(.|\\n)*/", *rules])
    return "\n".join([*_after_text(form, literal, marker_id is not None, repeats=repeats), *rules])


def _call_rules(tools: Sequence[Tool], form: ToolFormat, *, held: bool) -> list[str]:
    """A `call`, from its opening brace on. If not `held`, only texts that have a form are held to it."""
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{form.arguments_key}": '
        end = _text("}" + form.after)
        if tool.lark is not None:
            prefix = f"TEXT{index}_"
            text = START.replace(PREFIX, prefix)
            rules.append(f"call_{index}: {_text(head + INPUT)} {text} {_text(INPUT_END)} {end}")
            rules.append(tool.lark.replace(PREFIX, prefix))
            continue
        schema = _closed(known_keywords(tool.schema)) if held else {"type": "object"}
        rules.append(f"call_{index}: {_text(head)} {_json(schema)} {end}")
    return rules


def _after_text(form: ToolFormat, literal: Literal, is_token: bool, *, repeats: bool) -> list[str]:
    """Free text in which a marker begins calls, and which never holds the marker itself."""
    rest = (form.opening + form.before).removeprefix(form.marker)
    body = f"{_text(rest)} call {_text(form.closing)}"
    start = f"start: marked{{0,{MAX_CALLS}}} TEXT" if repeats else "start: TEXT | marked"
    text = f"TEXT: {ANY_TEXT} & ~({ANY_TEXT} {_text(form.marker)} {ANY_TEXT})"
    if is_token:
        return [start, f"marked: TEXT {literal(form.marker)} {body}", text]
    return [start, f"marked: trigger {body}", f"trigger[lazy]: TEXT {_text(form.marker)}", text]


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without arguments that it does not name, unless it says something about them.

    A function fails on them, and a small model would add them until its tokens run out.
    """
    if "properties" not in schema or not _OPEN.isdisjoint(schema):
        return schema
    return {**schema, "additionalProperties": False}


def known_keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without keywords that say nothing: zod writes one for records, and other clients null for none."""
    known: dict[str, Any] = {}
    for key, value in schema.items():
        if (value is None and key != "const") or (key, value) in _SILENT:
            continue
        if key in _VALUES:
            known[key] = value
        elif key in _NAMED and isinstance(value, dict):
            known[key] = {name: _known(each) for name, each in value.items()}
        else:
            known[key] = [_known(each) for each in value] if isinstance(value, list) else _known(value)
    return known


def _known(schema: Any) -> Any:
    return known_keywords(schema) if isinstance(schema, dict) else schema


def with_spaces(schema: Mapping[str, Any]) -> str:
    """A JSON schema as calls are held to it."""
    return json.dumps({"x-guidance": SPACES, **schema})


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {with_spaces(schema)}"


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
