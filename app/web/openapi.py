"""The application's document, from which standard generators make clients without a warning.

The schema allows the same as before, with two exceptions: a field that can only be null becomes a string or null, and
one that can only be true, or only false, becomes a boolean.
"""

import asyncio
from collections.abc import Iterator
from functools import cache
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import TypeAdapter

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


OPEN_PATHS = frozenset({"/health", "/ready", "/", "/docs"})
"""Those that need no key on any server."""
OPEN_FOLDER = "/static/"
"""What is under it needs none either: the page's files hold no data."""

SCHEMES: dict[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "an API key"},
    "header": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Api-Key",
        "description": "an API key, as clients of Anthropic's API send it",
    },
}


def is_open(path: str) -> bool:
    """Whether anybody may ask for the path."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def describe_security(document: dict[str, Any]) -> None:
    """Document the keys that the routes take.

    - Every route takes a key in each of the `SCHEMES`.
    - A request without a key is allowed too, because a server without keys needs none.
    - The routes of `OPEN_PATHS` need no key on any server.
    """
    document["components"]["securitySchemes"] = SCHEMES
    document["security"] = [{name: []} for name in SCHEMES] + [{}]
    for path in OPEN_PATHS & document["paths"].keys():
        for operation in document["paths"][path].values():
            operation["security"] = []


def describe_unions(components: dict[str, Schema]) -> None:
    """Change the components by every rule of this file. They allow the same as before."""
    for schema in components.values():
        _tell_apart(schema, components)
    for schema in _objects(list(components.values())):
        _require_tag(schema, components)
        _open_list(schema, components)


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    """Every object in `node`, which a rule may change meanwhile."""
    if isinstance(node, dict):
        yield node
    if isinstance(node, dict | list):
        for each in list(node.values() if isinstance(node, dict) else node):
            yield from _objects(each)


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


FRAMEWORK_REFUSAL = "HTTPValidationError"


class DescribedAPI(FastAPI):
    """An application whose `/openapi.json` generators of clients understand."""

    def openapi(self) -> dict[str, Any]:
        """The document, which is made once."""
        if self.openapi_schema is None:
            self.openapi_schema = _plain(super().openapi())
        return self.openapi_schema

    def setup(self) -> None:
        """Serve the document. To make it takes seconds of a processor: that is done on a thread, while turns go on."""
        making = asyncio.Lock()

        async def document(_: Request) -> Response:
            async with making:
                return Response(await asyncio.to_thread(written), media_type="application/json")

        @cache
        def written() -> bytes:
            return orjson.dumps(self.openapi())

        assert self.openapi_url is not None
        self.add_route(self.openapi_url, document, include_in_schema=False)


def component(type_: Any) -> Schema:
    """A schema that refers to the component of `type_`, a model or a named type, and brings it into the document."""
    listed = TypeAdapter(list[type_]).json_schema(ref_template=f"{REF}{{model}}")  # of a model alone it gives no `$ref`
    found: Schema = listed["items"] | {"$defs": listed["$defs"]}
    return found


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    components: dict[str, Schema] = document["components"]["schemas"]
    for operations in document["paths"].values():
        for operation in operations.values():
            # The 422 that FastAPI adds to each route that documents none: no route here answers with that.
            refusal = operation["responses"].get("422", {}).get("content", {}).get("application/json", {})
            if refusal.get("schema", {}).get("$ref", "").endswith(FRAMEWORK_REFUSAL):
                del operation["responses"]["422"]
    components.pop(FRAMEWORK_REFUSAL, None)
    for media in _objects(document["paths"]):  # parameters, headers and bodies
        if not isinstance(media.get("schema"), dict):
            continue
        for name, schema in media["schema"].pop("$defs", {}).items():
            components.setdefault(name, schema)
        media["schema"] = simplify(media["schema"])
    for name in sorted(components):
        components[name] = simplify(components.pop(name))
    describe_unions(components)
    named = {each["$ref"].removeprefix(REF) for each in _objects(document) if isinstance(each.get("$ref"), str)}
    document["components"]["schemas"] = {name: components[name] for name in components if name in named}
    describe_security(document)
    return document
