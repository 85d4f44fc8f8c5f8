"""A client that goes away: its turns end, and what they held is free."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.openai.conftest import MODEL

LONG: Any = {"model": MODEL, "prompt": ["x", "y"], "n": 2, "max_tokens": 1000, "ignore_eos": True}


def memory(client: httpx.Client) -> Any:
    return client.get("/v1/memory").json()


def wait_until_idle(client: httpx.Client, *, sessions: int) -> None:
    deadline = time.monotonic() + 10
    while (found := memory(client))["turns_running"] or found["turns_waiting"] or found["sessions"] != sessions:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_a_stream_that_is_closed_frees_everything(openai_url: str) -> None:
    with httpx.Client(base_url=openai_url, timeout=10) as client:
        before = memory(client)
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            assert memory(client)["turns_running"] > 0
        wait_until_idle(client, sessions=before["sessions"])
        # Conversations of other tests may have been evicted meanwhile, so less may be owned.
        assert memory(client)["data"]["device"]["owned_bytes"] <= before["data"]["device"]["owned_bytes"]


def test_a_call_that_does_not_stream_is_given_up_too(openai_url: str) -> None:
    with httpx.Client(base_url=openai_url, timeout=10) as client:
        before = memory(client)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=LONG, timeout=0.3)
        wait_until_idle(client, sessions=before["sessions"])


def test_a_bound_session_outlives_its_client(openai_url: str) -> None:
    call: Any = {**LONG, "prompt": "x", "n": 1, "stream": True}
    with httpx.Client(base_url=openai_url, timeout=10, headers={"X-Session-ID": "left"}) as client:
        before = memory(client)
        with client.stream("POST", "/v1/completions", json=call) as stream:
            session = stream.headers["x-session-id"]
            next(stream.iter_lines())
        wait_until_idle(client, sessions=before["sessions"] + 1)
        view = client.get(f"/v1/sessions/{session}").json()
        assert view["state"] == "idle"
        assert 2 < view["tokens"] < 1000


def test_grammars_of_clients_that_have_gone_are_not_compiled(openai_url: str) -> None:
    call: Any = {"model": MODEL, "prompt": "x", "max_tokens": 4}
    with httpx.Client(base_url=openai_url, timeout=60) as client:

        def constrained(regex: str, timeout: float = 60) -> httpx.Response:
            constraint = {"structured_outputs": {"regex": regex}}
            return client.post("/v1/completions", json=call | constraint, timeout=timeout)

        one = constrained("x((b{100}){100}){100}").elapsed  # its automaton is refused once it is built
        for number in range(20):
            with pytest.raises(httpx.ReadTimeout):
                constrained(f"{number}((b{{100}}){{100}}){{100}}", timeout=0.05)
        answer = constrained("abc")
        assert answer.json()["choices"][0]["text"] == "abc"
        assert answer.elapsed < 10 * one
