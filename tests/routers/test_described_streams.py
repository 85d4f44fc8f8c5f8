"""The document describes each event of a stream, and the JSON text in its data."""

import json
from typing import Any

import httpx
import pytest

from tests.described_events import DONE, UNNAMED, check_stream

GENERATE = "/v1/sessions/{session_id}/generate"
RESUME = "/v1/sessions/{session_id}/resume"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASKED: Any = [{"role": "user", "content": "a"}]
PARAMETERS: Any = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
SHORT: list[Any] = [
    (CHAT, {"messages": ASKED, "max_tokens": 3}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 3}),
    (RESPONSES, {"input": "a", "max_output_tokens": 3}),
    (MESSAGES, {"messages": ASKED, "max_tokens": 3}),
]
FUNCTION: Any = {"type": "function", "name": "f", "parameters": PARAMETERS}
CHAT_CALL: Any = {"tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]}
CHAT_CALL |= {"tool_choice": "required", "parallel_tool_calls": False}
RESPONSE_CALL: Any = {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}
ONE: Any = {"type": "any", "disable_parallel_tool_use": True}
MESSAGE_CALL: Any = {"tools": [{"name": "f", "input_schema": PARAMETERS}], "tool_choice": ONE}
LAST_NAMES = {CHAT: UNNAMED, COMPLETIONS: UNNAMED, RESPONSES: "response.failed", MESSAGES: "error"}
"""How the last event of a failed stream is named; OpenAI's older routes name none."""


@pytest.fixture
def document(http: httpx.Client) -> Any:
    return http.get("/openapi.json").json()


def send(http: httpx.Client, path: str, body: dict[str, Any], session: str | None = None) -> bytes:
    """The whole stream."""
    model = http.get("/v1/models").json()["data"][0]["id"]
    headers = {} if session is None else {"X-Session-ID": session}
    answer = http.post(path, json={"model": model, "stream": True, **body}, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return answer.content


def types_of(data: Any) -> set[str]:
    """The type of an event's data, and that of its `delta` where it has one."""
    delta = data.get("delta")
    return {each["type"] for each in (data, delta) if isinstance(each, dict) and "type" in each}


def test_events_of_a_turn(http: httpx.Client, document: Any) -> None:
    session = http.post("/v1/sessions").json()["id"]
    http.post(f"/v1/sessions/{session}/breakpoints", json={"layer": 0, "action": "pause", "once": True})
    asked = {"token_ids": [5], "logprobs": 1, "max_tokens": 3, "stream": True}
    turn = check_stream(document, GENERATE, http.post(f"/v1/sessions/{session}/generate", json=asked).content)
    assert turn[-1]["event"] == "paused"
    resumed = http.post(f"/v1/sessions/{session}/resume", json={"stream": True})
    assert [event["event"] for event in check_stream(document, RESUME, resumed.content)][-2:] == ["token", "finished"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": ASKED, "logprobs": True, "top_logprobs": 1}),
        (CHAT, {"messages": ASKED, "max_tokens": 300, **CHAT_CALL}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1, "echo": True, "return_token_ids": True}),
    ],
)
def test_chunks(http: httpx.Client, document: Any, path: str, body: dict[str, Any]) -> None:
    asked = {"stream_options": {"include_usage": True}, "max_tokens": 3, **body}
    *chunks, last = check_stream(document, path, send(http, path, asked))
    assert len(chunks) >= 3
    assert last["data"] == DONE


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (RESPONSES, {"max_output_tokens": 3, "temperature": 0, "top_logprobs": 2}, "response.output_text.delta"),
        (RESPONSES, {"max_output_tokens": 300, **RESPONSE_CALL}, "response.function_call_arguments.delta"),
        (MESSAGES, {"max_tokens": 3, "temperature": 0}, "text_delta"),
        (MESSAGES, {"max_tokens": 300, **MESSAGE_CALL}, "input_json_delta"),
    ],
    ids=["response", "response with a call", "message", "message with a call"],
)
def test_named_events(http: httpx.Client, document: Any, path: str, body: dict[str, Any], expected: str) -> None:
    prompt = {"input": "a"} if path == RESPONSES else {"messages": ASKED}
    events = check_stream(document, path, send(http, path, {**prompt, **body}))
    told = [json.loads(event["data"]) for event in events]
    assert [data["type"] for data in told] == [event["event"] for event in events]
    assert expected in set().union(*map(types_of, told))


@pytest.mark.parametrize(("path", "body"), SHORT)
def test_a_stream_that_fails(http: httpx.Client, document: Any, path: str, body: dict[str, Any]) -> None:
    """The session's breakpoint makes the logits infinite: the turn fails after the stream has begun."""
    session = http.post("/v1/sessions").json()["id"]
    edits = [{"op": "scale", "factor": 1e6}] * 8
    armed = http.post(f"/v1/sessions/{session}/breakpoints", json={"layer": 0, "action": "edit", "edits": edits})
    assert armed.status_code == 201, armed.text
    events = check_stream(document, path, send(http, path, body, session))
    assert events[-1]["event"] == LAST_NAMES[path]
    told = json.loads(events[-1]["data"])
    assert told.get("response", told)["error"]
