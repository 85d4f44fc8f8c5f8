"""What a field takes and what it was given, in words."""

from collections.abc import Sequence
from typing import Any

import orjson

from app.web.errors.field_schema import Schema

LONGEST_SHOWN = 40
"""Characters of a string that an error message repeats."""
NOUNS = {
    "integer": ("an integer", "integer"),
    "number": ("a number", "number"),
    "string": ("a string", "string"),
    "boolean": ("true or false", "boolean"),
    "array": ("a list", "list"),
    "object": ("an object", "object"),
    "null": ("null", "null"),
}
"""By the `type` of a JSON schema: one of them, and the word that can be counted."""
SIZES = {"string": ("Length", "character"), "array": ("Items", "item"), "object": ("Properties", "field")}
"""By the `type` of a JSON schema: the end of its keywords for a size, and what is counted."""


def allowed(schemas: Sequence[Schema]) -> str:
    """What a value may be. `null` is left out where there is anything else: it means the same as no value."""
    values = [schema for schema in schemas if schema.get("type") != "null"]
    return " or ".join(dict.fromkeys(map(_allowed, values))) or "null"


def given(value: object) -> str:
    """What came instead: short values as JSON, of long ones their kind and size."""
    match value:
        case list():
            return f"a list of {len(value)}"
        case dict():
            return f"an object of {len(value)}"
        case str() if len(value) > LONGEST_SHOWN:
            return f"a string of {len(value)} characters"
        case str():
            return f"'{value}'"
        case float() if value != value:
            return "NaN"
        case float() if abs(value) == float("inf"):
            return "a number beyond the range of float64"
        case None | bool():
            return orjson.dumps(value).decode()
    return str(value)


def _allowed(schema: Schema) -> str:
    if "const" in schema or "enum" in schema:
        *others, last = (given(value) for value in schema.get("enum", [schema.get("const")]))
        return f"{', '.join(others)} or {last}" if others else last
    kind = schema.get("type", "object")
    noun = NOUNS[kind][0]
    if "pattern" in schema:
        return f"{noun} that matches {schema['pattern']}"
    if kind in ("integer", "number"):
        return f"{noun} {_range(schema)}".rstrip()
    if schema.get("maxItems") == 0:
        return "an empty list"
    size = _size(schema, kind) if kind in SIZES else ""
    return f"{noun} of {size}" if size else noun


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"from {low} to {high}"
    ends = {
        "above": schema.get("exclusiveMinimum"),
        "at least": low,
        "below": schema.get("exclusiveMaximum"),
        "at most": high,
    }
    return " and ".join(f"{word} {end}" for word, end in ends.items() if end is not None)


def _size(schema: Schema, kind: str) -> str:
    """How many characters, items or fields; empty if any number will do."""
    keyword, counted = SIZES[kind]
    if kind == "array":
        counted = NOUNS.get(schema.get("items", {}).get("type"), ("", counted))[1]
    low, high = schema.get(f"min{keyword}", 0), schema.get(f"max{keyword}")
    if high is None:
        size, last = (f"at least {low}", low) if low else ("", 0)
    elif low == high:
        size, last = str(high), high
    else:
        size, last = f"{low} to {high}" if low else f"at most {high}", high
    return size and f"{size} {counted}{'' if last == 1 else 's'}"


def limits_of(context: dict[str, Any]) -> Schema:
    """The JSON schema of the limits that an error of pydantic itself names."""
    keywords = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    return {keywords[name]: limit for name, limit in context.items() if name in keywords}
