"""The JSON schema of one field of a request, found by pydantic's location of an error."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

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
