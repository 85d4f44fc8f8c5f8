"""What the tests of `generate` share: a prompt, a streamed turn, and waiting for the end of one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from httpx_sse import ServerSentEvent, connect_sse

PROMPT: dict[str, Any] = {"token_ids": [5, 6, 7, 8], "ignore_eos": True}
GREEDY = {**PROMPT, "temperature": 0}


@contextmanager
def streaming(http: httpx.Client, session: str, **body: Any) -> Iterator[Iterator[ServerSentEvent]]:
    with connect_sse(http, "POST", f"{session}/generate", json={"stream": True, **body}) as source:
        assert source.response.status_code == 200
        yield source.iter_sse()


def wait_until_idle(http: httpx.Client, session: str) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found: dict[str, Any] = http.get(session).json()
        if found["state"] == "idle":
            return found
        time.sleep(0.01)
    raise AssertionError(f"still {found['state']}")
