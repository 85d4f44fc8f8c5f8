"""Events of streams against the schemas that the document has for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
from httpx_sse import EventSource
from jsonschema import Draft202012Validator

DONE = "[DONE]"
"""The last event of an OpenAI stream without an error: no JSON, as the document says."""


def read_events(content: bytes) -> Iterator[dict[str, str]]:
    """The events of a whole stream; they are named `message` where the server gives no name."""
    response = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=content)
    for event in EventSource(response).iter_sse():
        yield {"event": event.event, "data": event.data}


def check_event(document: Any, path: str, event: dict[str, str]) -> None:
    """The event fits the documented one, and its data the component that `contentSchema` names."""
    described = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    _check(document, described, event)
    components = document["components"]["schemas"]
    component = components[described["$ref"].rpartition("/")[2]]
    if "discriminator" in component:
        component = components[component["discriminator"]["mapping"][event["event"]].rpartition("/")[2]]
    _check(document, component["properties"]["data"]["contentSchema"], json.loads(event["data"]))


def check_stream(document: Any, path: str, content: bytes) -> list[dict[str, str]]:
    """Check each event of a whole stream but `[DONE]`, which only an OpenAI stream has; returns all of them."""
    events = list(read_events(content))
    for event in events:
        if event["data"] != DONE:
            check_event(document, path, event)
    return events


def _check(document: Any, schema: dict[str, Any], value: object) -> None:
    Draft202012Validator({**schema, "components": document["components"]}).validate(value)
