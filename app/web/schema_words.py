"""What a field takes and what it was given, in words: by the JSON schema of the field."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import orjson
from pydantic import TypeAdapter

Schema = dict[str, Any]
"""A JSON schema."""
KEY = "[key]"
"""The end of pydantic's location where an entry of a dictionary has a wrong key."""


@cache
def schema_of(model: Any) -> Schema:
    """The JSON schema of what a request sends for the type `model`."""
    return TypeAdapter(model).json_schema()


def find_field(root: Schema, location: Sequence[str | int]) -> tuple[str, list[Schema]]:
    """The dotted path of the field at `location`, and each schema that its value may follow.

    Parts of a location that name no field, such as members of unions, are left out of the path.
    """
    is_key = bool(location) and location[-1] == KEY
    path: list[str] = []
    schemas = list(_alternatives(root, root))
    for part in location[:-1] if is_key else location:
        entered = [_child(schema, part) for schema in schemas]
        if found := [each for child in entered if child is not None for each in _alternatives(child, root)]:
            outer, schemas = schemas, found
            path.append(str(part))
    if is_key:
        schemas = [{"type": "string", **schema["propertyNames"]} for schema in outer if "propertyNames" in schema]
    return ".".join(filter(None, path)), schemas


def _alternatives(schema: Schema, root: Schema) -> Iterator[Schema]:
    if "$ref" in schema:
        yield from _alternatives(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    elif members := schema.get("anyOf") or schema.get("oneOf"):
        for member in members:
            yield from _alternatives(member, root)
    else:
        yield schema


def _child(schema: Schema, part: str | int) -> Schema | None:
    """The schema of an item or a property; None where there is no such one."""
    if isinstance(part, int):
        child = dict(enumerate(schema.get("prefixItems", ()))).get(part, schema.get("items"))
    else:
        child = schema.get("properties", {}).get(part, schema.get("additionalProperties"))
    return child if isinstance(child, dict) else None


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
    words = dict.fromkeys(map(_allowed, values))
    sized = [each for each in words if each.partition(" of ")[0] in words and " of " in each]
    return " or ".join(each for each in words if each not in sized) or "null"


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
    if kind in ("integer", "number"):
        noun = f"a multiple of {schema['multipleOf']}" if "multipleOf" in schema else noun
        return f"{noun} {_range(schema)}".rstrip()
    if schema.get("maxItems") == 0:
        return "an empty list"
    size = _size(schema, kind) if kind in SIZES else ""
    words = f"{noun} of {size}" if size else noun
    return f"{words} that matches {schema['pattern']}" if "pattern" in schema else words


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
