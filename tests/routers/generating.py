"""What the tests of `generate` share: prompts, a streamed turn, and waits for what a session tells."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import httpx
from httpx_sse import ServerSentEvent, connect_sse

from tests.waiting import PATIENCE_S

PROMPT: dict[str, Any] = {"token_ids": [5, 6, 7, 8], "ignore_eos": True}
GREEDY = {**PROMPT, "temperature": 0}
CONTEXT = {**GREEDY, "token_ids": list(range(3, 103)), "max_tokens": 4}
"""A turn whose context is 7 blocks."""


@contextmanager
def streaming(http: httpx.Client, session: str, **body: Any) -> Iterator[Iterator[ServerSentEvent]]:
    with connect_sse(http, "POST", f"{session}/generate", json={"stream": True, **body}) as source:
        assert source.response.status_code == 200
        yield source.iter_sse()


def wait_for(http: httpx.Client, session: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while not condition(found := http.get(session).json()):
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    return cast("dict[str, Any]", found)


def in_tier(tier: str) -> Callable[[dict[str, Any]], bool]:
    return lambda session: bool(session["kv"]["tier"] == tier)


def wait_until_idle(http: httpx.Client, session: str) -> dict[str, Any]:
    return wait_for(http, session, lambda found: bool(found["state"] == "idle"))
