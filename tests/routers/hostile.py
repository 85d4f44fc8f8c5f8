"""Requests that are made to break the server, and the refusal that each API has for them."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.errors import assert_messages_error

TIMEOUT_S = 20
"""A refusal takes 2 s at most; a machine that is busy with other tests needs longer."""
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED: Any = [{"role": "user", "content": "a"}]
DEEP = "[" * 100_000


def send(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """As clients do that check nothing: half of a surrogate pair and NaN are in the text as they are."""
    model = client.get("/v1/models").json()["data"][0]["id"]
    text = json.dumps({"model": model, **body})
    return client.post(path, content=text, headers={"content-type": "application/json"})


def assert_refused(path: str, answer: httpx.Response) -> str:
    """The API's own error body, with 400; returns its message."""
    if path == MESSAGES:
        return assert_messages_error(answer, 400)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "code", "param"}
    message: str = error["message"]
    return message
