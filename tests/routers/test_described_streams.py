"""The document describes each event of a stream, and the JSON text in its data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse
from jsonschema import Draft202012Validator


@pytest.fixture
def document(http: httpx.Client) -> Any:
    return http.get("/openapi.json").json()


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The events; without a name where the server gives none."""
    with connect_sse(http, "POST", path, json={**body, "stream": True, "max_tokens": 3}) as source:
        for event in source.iter_sse():
            yield {"event": event.event, "data": event.data}


def check(document: Any, schema: dict[str, Any], value: object) -> None:
    Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def check_event(document: Any, path: str, event: dict[str, str]) -> None:
    """The event fits the documented one, and its data the component that `contentSchema` names."""
    described = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    check(document, described, event)
    components = document["components"]["schemas"]
    component = components[described["$ref"].rpartition("/")[2]]
    if "discriminator" in component:
        component = components[component["discriminator"]["mapping"][event["event"]].rpartition("/")[2]]
    check(document, component["properties"]["data"]["contentSchema"], json.loads(event["data"]))


def test_events_of_a_turn(http: httpx.Client, document: Any) -> None:
    session = http.post("/v1/sessions").json()["id"]
    http.post(f"/v1/sessions/{session}/breakpoints", json={"layer": 0, "action": "pause", "once": True})
    turn = list(streamed(http, f"/v1/sessions/{session}/generate", {"token_ids": [5], "logprobs": 1}))
    assert turn[-1]["event"] == "paused"
    for event in turn:
        check_event(document, "/v1/sessions/{session_id}/generate", event)
    with connect_sse(http, "POST", f"/v1/sessions/{session}/resume", json={"stream": True}) as source:
        rest = [{"event": event.event, "data": event.data} for event in source.iter_sse()]
    assert [event["event"] for event in rest][-2:] == ["token", "finished"]
    for event in rest:
        check_event(document, "/v1/sessions/{session_id}/resume", event)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1}),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True, "return_token_ids": True}),
    ],
)
def test_chunks(http: httpx.Client, document: Any, path: str, body: dict[str, Any]) -> None:
    model = http.get("/v1/models").json()["data"][0]["id"]
    *chunks, last = streamed(http, path, {"model": model, "stream_options": {"include_usage": True}, **body})
    assert len(chunks) >= 3
    assert last["data"] == "[DONE]"
    for chunk in chunks:
        check_event(document, path, chunk)
    name = "ChatCompletionChunk" if "chat" in path else "CompletionChunk"
    known = document["components"]["schemas"][name]["properties"]
    assert {field for chunk in chunks for field in json.loads(chunk["data"])} <= known.keys()
