"""The application's document, from which standard generators make clients without a warning."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from app.web.openapi.schemas import REF, Schema, simplify
from app.web.openapi.security import describe_security
from app.web.openapi.unions import describe_unions

FRAMEWORK_REFUSAL = "HTTPValidationError"


class DescribedAPI(FastAPI):
    """An application whose `/openapi.json` generators of clients understand."""

    def openapi(self) -> dict[str, Any]:
        """The document, which is made once."""
        if self.openapi_schema is None:
            self.openapi_schema = _plain(super().openapi())
        return self.openapi_schema


def component(type_: Any) -> Schema:
    """A schema that refers to the component of `type_`, a model or a named type, and brings it into the document."""
    listed = TypeAdapter(list[type_]).json_schema(ref_template=f"{REF}{{model}}")  # of a model alone it gives no `$ref`
    found: Schema = listed["items"] | {"$defs": listed["$defs"]}
    return found


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    components: dict[str, Schema] = document["components"]["schemas"]
    for operations in document["paths"].values():
        for operation in operations.values():
            _drop_framework_refusal(operation["responses"])
    components.pop(FRAMEWORK_REFUSAL, None)
    for media in _schema_holders(document["paths"]):
        for name, schema in media["schema"].pop("$defs", {}).items():
            components.setdefault(name, schema)
        media["schema"] = simplify(media["schema"])
    for name in sorted(components):
        components[name] = simplify(components.pop(name))
    describe_unions(components)
    named = _named(document)
    document["components"]["schemas"] = {name: components[name] for name in components if name in named}
    describe_security(document)
    return document


def _drop_framework_refusal(responses: dict[str, Any]) -> None:
    """Drop the 422 that FastAPI adds to each route that documents none: no route here answers with that."""
    content = responses.get("422", {}).get("content", {})
    if content.get("application/json", {}).get("schema", {}).get("$ref", "").endswith(FRAMEWORK_REFUSAL):
        del responses["422"]


def _named(node: Any) -> set[str]:
    """The components that something under `node` refers to."""
    if isinstance(node, list):
        return set().union(*map(_named, node))
    if not isinstance(node, dict):
        return set()
    here = {node["$ref"].removeprefix(REF)} if isinstance(node.get("$ref"), str) else set()
    return here.union(*map(_named, node.values()))


def _schema_holders(node: Any) -> Iterator[dict[str, Any]]:
    """Every object under `node` that has a `schema`: parameters, headers and bodies."""
    if isinstance(node, list):
        for each in node:
            yield from _schema_holders(each)
    elif isinstance(node, dict):
        if isinstance(node.get("schema"), dict):
            yield node
        for key, value in node.items():
            if key != "schema":
                yield from _schema_holders(value)
