"""Rules that put a JSON schema into a form that generators of clients understand.

The schema allows the same as before, with two exceptions: a field that can only be null becomes a string or null, and
one that can only be true, or only false, becomes a boolean.
"""

from typing import Any

Schema = dict[str, Any]
"""A JSON schema."""

REF = "#/components/schemas/"
"""Begins a reference to a component."""
NULL: Schema = {"type": "null"}
NAMED = ("$defs", "patternProperties", "properties")
"""Keywords whose value has a schema under each name."""
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords whose value is a list of schemas."""


def simplify(schema: Schema) -> Schema:
    """The schema by every rule of this file, and so all schemas in it."""
    found = {key: _simplify_value(key, value) for key, value in schema.items() if key != "title"}
    for rule in (_flatten_union, _widen_null, _widen_boolean, _list_tuple):
        found = rule(found)
    return found


def _simplify_value(key: str, value: Any) -> Any:
    if key in NAMED:
        return {name: simplify(each) for name, each in value.items()}
    if key in LISTED:
        return [each if each == NULL else simplify(each) for each in value]
    if key in ("items", "additionalProperties", "propertyNames", "contentSchema") and isinstance(value, dict):
        return simplify(value)
    return value


def _flatten_union(schema: Schema) -> Schema:
    """A union in a union becomes one, and a union of one member becomes that member."""
    if "anyOf" not in schema:
        return schema
    members: list[Schema] = []
    for member in schema["anyOf"]:
        members += [each for each in member.get("anyOf", [member]) if each not in members]
    if len(members) == 1:
        return members[0] | _without(schema, "anyOf")
    return schema | {"anyOf": members}


def _widen_null(schema: Schema) -> Schema:
    """Generators have no type for null alone."""
    if schema.get("type") != "null":
        return schema
    return _without(schema, "type") | {"anyOf": [{"type": "string"}, NULL]}


def _widen_boolean(schema: Schema) -> Schema:
    """OpenAPI Generator's Python client takes a constant boolean for a constant text, and refuses the boolean."""
    return _without(schema, "const") if schema.get("type") == "boolean" else schema


def _list_tuple(schema: Schema) -> Schema:
    """A tuple whose items are alike becomes a list of fixed length: few generators know `prefixItems`."""
    members = schema.get("prefixItems", [])
    if not members or any(member != members[0] for member in members):
        return schema
    return _without(schema, "prefixItems") | {"items": members[0]}


def _without(schema: Schema, key: str) -> Schema:
    return {each: value for each, value in schema.items() if each != key}
