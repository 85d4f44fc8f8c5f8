"""The page of every route, from the OpenAPI document."""

import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from docs.site.markdown import table

HEAD = """# Every route

Every route of the server, as its OpenAPI document `/openapi.json` has it. `/docs` of a running server tries them out.
The [overview](../api.md) explains sessions, streams, sampling and headers.
[Errors](../api.md#errors) tells their causes.

"""
TAGS = {"openai": "OpenAI", "anthropic": "Anthropic"}
FIRST_ERROR = 400


def document() -> dict[str, Any]:
    """The OpenAPI document of a server that need not run."""
    from app.main import ROUTERS
    from app.web.openapi import DescribedAPI

    app = DescribedAPI(title="Djinn")
    for router in ROUTERS:
        app.include_router(router)
    return app.openapi()


def routes_page(described: Mapping[str, Any]) -> str:
    """The page of a document: a section for each tag, a route after the other in it."""
    sections: dict[str, list[str]] = {}
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            [tag] = operation["tags"]
            sections.setdefault(tag, []).append(_route(f"{method.upper()} {path}", operation))
    titled = (f"## {TAGS.get(tag, tag.capitalize())}\n\n" + "\n".join(routes) for tag, routes in sections.items())
    return HEAD + "\n".join(titled)


def _route(name: str, operation: Mapping[str, Any]) -> str:
    facts = [f"Operation: `{operation['operationId']}`"]
    if body := operation.get("requestBody"):
        facts.append(f"Body: {_contents(body['content'])}")
    facts += _answers(operation["responses"])
    parts = [f"### `{name}`", operation.get("description", ""), "\n".join(f"- {fact}" for fact in facts)]
    if operation.get("parameters"):
        parts.append(table(("parameter", "in", "type", "meaning"), map(_parameter, operation["parameters"])).rstrip())
    return "\n\n".join(parts) + "\n"


def _parameter(parameter: Mapping[str, Any]) -> tuple[str, str, str, str]:
    schema = parameter["schema"]
    default = f" (default: `{schema['default']}`)" if schema.get("default") is not None else ""
    must = ", required" if parameter.get("required") else ""
    text = parameter.get("description", schema.get("description", ""))
    return f"`{parameter['name']}`", parameter["in"] + must, _type(schema), text + default


def _answers(responses: Mapping[str, Any]) -> Iterator[str]:
    for status, response in responses.items():
        if int(status) < FIRST_ERROR:
            content = _contents(response.get("content", {})) or HTTPStatus(int(status)).phrase.lower()
            yield f"Answer {status}: {content}"
    if errors := [status for status in responses if int(status) >= FIRST_ERROR]:
        yield f"Errors: {', '.join(errors)}"


def _contents(content: Mapping[str, Any]) -> str:
    return ", or ".join(f"{_type(media.get('schema', {}))} as `{kind}`" for kind, media in content.items())


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words: the name of a component, or the type and its range."""
    if reference := schema.get("$ref"):
        return f"`{reference.rpartition('/')[2]}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if choices := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(_type(choice) for choice in choices if choice.get("type") != "null")
    kind = str(schema.get("type", "any"))
    least, most = schema.get("minimum"), schema.get("maximum")
    ranged = {(True, True): f", {least} to {most}", (True, False): f", from {least}", (False, True): f", to {most}"}
    found = kind + ranged.get((least is not None, most is not None), "")
    return re.sub(r"^array", f"list of {_type(schema['items'])}", found) if "items" in schema else found
