"""Rules for unions: generators of clients know their members apart, and write code that compiles."""

from collections.abc import Iterator
from typing import Any

from app.web.openapi.schemas import REF, Schema


def describe_unions(components: dict[str, Schema]) -> None:
    """Change the components by every rule of this file. They allow the same as before."""
    for schema in components.values():
        _tell_apart(schema, components)
    for schema in _schemas(list(components.values())):
        _require_tag(schema, components)
        _open_list(schema, components)


def _schemas(node: Any) -> Iterator[Schema]:
    """Every object in `node`, which a rule may change meanwhile."""
    if isinstance(node, dict):
        yield node
    if isinstance(node, dict | list):
        for each in list(node.values() if isinstance(node, dict) else node):
            yield from _schemas(each)


def _tell_apart(schema: Schema, components: dict[str, Schema]) -> None:
    """Give a union of components the `discriminator` that they have: a required field with other constants in each."""
    members = [each.get("$ref", "").removeprefix(REF) for each in schema.get("oneOf", ())]
    if not members or not all(members) or "discriminator" in schema:
        return
    for field in components[members[0]].get("required", ()):
        constants = [(value, name) for name in members for value in _constants(components[name], field)]
        mapping = {value: REF + name for value, name in constants}
        if len(mapping) == len(constants) and set(mapping.values()) == {REF + name for name in members}:
            schema["discriminator"] = {"propertyName": field, "mapping": mapping}
            return


def _constants(schema: Schema, field: str) -> list[str]:
    """The values of a required field that can only have these."""
    if field not in schema.get("required", ()):
        return []
    found = schema["properties"][field]
    constants: list[str] = found.get("enum", [found["const"]] if "const" in found else [])
    return constants


def _require_tag(schema: Schema, components: dict[str, Schema]) -> None:
    """Require the field that tells the members apart: generators refuse an optional one.

    It is always there. Answers have all their fields, and no request may leave a tag out.
    """
    if "discriminator" not in schema:
        return
    field = schema["discriminator"]["propertyName"]
    for reference in schema["discriminator"]["mapping"].values():
        member = components[reference.removeprefix(REF)]
        if field not in member.get("required", ()):
            member["required"] = [field, *member.get("required", ())]


def _open_list(schema: Schema, components: dict[str, Schema]) -> None:
    """Make a union of a list and a text `anyOf`, if the list's items are a union too.

    Of a list in a `oneOf`, the generator typescript-fetch checks each item by a function. It writes no such function
    for a union.
    """
    if any(_is_union(member.get("items", {}), components) for member in schema.get("oneOf", ())):
        schema["anyOf"] = schema.pop("oneOf")


def _is_union(schema: Schema, components: dict[str, Schema]) -> bool:
    found = components[schema["$ref"].removeprefix(REF)] if "$ref" in schema else schema
    return "oneOf" in found or "anyOf" in found
