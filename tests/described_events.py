"""Events of streams against the schemas that the document has for them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
from httpx_sse import EventSource
from jsonschema import Draft202012Validator

DONE = "[DONE]"
"""The last event of an OpenAI stream without an error: no JSON, as the document says."""
UNNAMED = "message"
"""Readers of streams give this name to an event that has none."""


def read_events(content: bytes) -> Iterator[dict[str, str]]:
    """The events of a whole stream; one without a name is `UNNAMED`."""
    response = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=content)
    for event in EventSource(response).iter_sse():
        yield {"event": event.event, "data": event.data}


def check_stream(document: Any, path: str, content: bytes) -> list[dict[str, str]]:
    """Check each event of a whole stream but `[DONE]`, which only an OpenAI stream has; returns all of them.

    An event fits the documented one, and its data the component that `contentSchema` names. Their objects have no
    field that the document leaves out.
    """
    methods = document["paths"][path]
    answers = methods.get("post", methods.get("get"))["responses"]
    described = answers["200"]["content"]["text/event-stream"]["schema"]
    components = _closed(document["components"]["schemas"])
    events = list(read_events(content))
    for event in events:
        if event["data"] != DONE:
            _check_event(components, described, event)
    return events


def _check_event(components: dict[str, Any], described: dict[str, Any], event: dict[str, str]) -> None:
    sent = {"data": event["data"]} if event["event"] == UNNAMED else event
    _check(components, described, sent)
    component = components[described["$ref"].rpartition("/")[2]]
    if "discriminator" in component:
        component = components[component["discriminator"]["mapping"][event["event"]].rpartition("/")[2]]
    _check(components, component["properties"]["data"]["contentSchema"], json.loads(event["data"]))


def _check(components: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    Draft202012Validator({**schema, "components": {"schemas": components}}).validate(value)


def _closed(node: Any) -> Any:
    """The schemas, whose objects take no field but their `properties`, unless a schema says which others it takes."""
    if isinstance(node, list):
        return [_closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    closed = {key: _closed(value) for key, value in node.items()}
    is_object = node.get("type") == "object" and "properties" in node
    return {"additionalProperties": False} | closed if is_object else closed
