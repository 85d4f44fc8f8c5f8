"""What goes wrong comes back as the SDK's typed exceptions, with Anthropic's error body."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.anthropic.conftest import ASK
from tests.serving import serve

PATHS = ["/v1/messages", "/v1/messages/count_tokens"]
IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
TOOL: Any = {"name": "now", "input_schema": {"type": "object"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
CALLED: Any = {"type": "tool_use", "id": "toolu_a", "name": "now", "input": {}}


def check_body(response: httpx.Response, status: int, kind: str) -> str:
    """That it is Anthropic's error body; returns the message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["error"].keys(), body["error"]["type"]) == ("error", {"type", "message"}, kind)
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    message: str = body["error"]["message"]
    return message


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_model_is_not_found(sdk: anthropic.Anthropic, http: httpx.Client, path: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        sdk.messages.create(**{**ASK, "model": "claude"})
    body = {"model": "claude", "messages": ASK["messages"]} | ({"max_tokens": 1} if path == PATHS[0] else {})
    assert "claude" in check_body(http.post(path, json=body), 404, "not_found_error")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 9000}, "needs room for 9000 more"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [CALLED]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content.0.content.0.type"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": [CALLED]}]}, "messages.1.content"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "so "}]}, "messages.1.content"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ],
)
def test_a_bad_field_is_named(sdk: anthropic.Anthropic, wrong: Any, named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        sdk.messages.create(**ASK, extra_body=wrong)
    assert caught.value.type == "invalid_request_error"
    assert named in str(caught.value)


@pytest.mark.parametrize("path", PATHS)
def test_what_never_reaches_the_route_has_the_same_body(http: httpx.Client, path: str) -> None:
    check_body(http.get(path), 405, "invalid_request_error")
    broken = http.post(path, content=b"{", headers={"content-type": "application/json"})
    check_body(broken, 400, "invalid_request_error")
    check_body(http.post(path, headers={"Host": "rebound.example"}, json={}), 403, "permission_error")
    check_body(http.post(f"{path}?x=1", json=ASK), 400, "invalid_request_error")
    packed = http.post(path, content=b"x", headers={"content-encoding": "gzip"})
    check_body(packed, 415, "invalid_request_error")


@pytest.fixture(scope="module")
def guarded(roomy_model: Path) -> Iterator[str]:
    """Base URL of a server with keys, a queue for one turn and a low limit for bodies."""
    settings: Any = {"api_keys": ("one", "two"), "max_queue": 1, "max_running": 1, "max_request_bytes": 2000}
    with serve(model=str(roomy_model), strict_fields=True, **settings) as url:
        yield url


def test_keys_and_limits_have_their_own_words(guarded: str) -> None:
    with httpx.Client(base_url=guarded, headers={"x-api-key": "wrong"}, timeout=30) as http:
        check_body(http.post("/v1/messages", json=ASK), 401, "authentication_error")
        http.headers["x-api-key"] = "one"
        check_body(http.post("/v1/messages", json={**ASK, "system": "x" * 3000}), 413, "request_too_large")
        unknown = http.post("/v1/messages", json={**ASK, "unheard_of": 1})
        assert "unheard_of" in check_body(unknown, 400, "invalid_request_error")


def test_a_full_queue_is_a_rate_limit(guarded: str) -> None:
    with anthropic.Anthropic(base_url=guarded, api_key="one", max_retries=0) as client:
        long: Any = {**ASK, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
        running = client.messages.create(**long, stream=True)
        next(iter(running))
        waiting = client.messages.with_raw_response.create(**long, stream=True)
        with pytest.raises(anthropic.RateLimitError) as caught:
            client.messages.create(**long)
        assert caught.value.response.headers["retry-after"] == "1"
        running.close()
        waiting.http_response.close()


def test_an_error_after_the_start_is_an_event(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    bound: Any = {"extra_headers": {"X-Session-ID": "cancelled-from-elsewhere"}}
    long: Any = {**ASK, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    raw = sdk.messages.with_raw_response.create(**long, **bound, stream=True)
    stream = raw.parse()
    next(iter(stream))
    assert http.post(f"/v1/sessions/{raw.headers['x-session-id']}/cancel").status_code == 200
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(stream)
    body: Any = caught.value.body
    assert body["error"] == {"type": "invalid_request_error", "message": "the turn was cancelled"}
    assert body["request_id"] == raw.headers["request-id"]
