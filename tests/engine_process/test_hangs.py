"""A server whose engine is suspended: what clients of each API see of it, and how it comes back."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.front.doors import serving_door
from tests.durability.restarting import generate, open_session
from tests.engine_process.test_engine_process import PROMPT, engine_of
from tests.errors import assert_error, assert_messages_error
from tests.processes import ServerProcess, metric, serve_process, until_ready
from tests.waiting import wait_until

MODEL = "tiny-llama"
READY_S, TURNS_S, AT_ONCE_S = 5.0, 10.0, 2.0
"""Within which the server says that it is not ready, turns that run have failed, and new ones are refused."""
SLACK_S = 4.0
"""For a busy machine."""
LONG: dict[str, Any] = {"max_tokens": 900, "temperature": 0}
SAID: list[Any] = [{"role": "user", "content": "Hi"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": SAID, "ignore_eos": True, **LONG},
    "/v1/completions": {"model": MODEL, "prompt": "Hi", "ignore_eos": True, **LONG},
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 900, "ignore_eos": True},
    "/v1/messages": {"model": MODEL, "messages": SAID, "max_tokens": 900, "ignore_eos": True},
}


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve_process(tmp_path_factory.mktemp("hangs") / "state", own_engine=True) as server:
        yield server


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        until_ready(http)
        yield http


class Asked(threading.Thread):
    """A call under way; `events` is what its stream has said, `answer` its whole answer."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.url, self.path, self.body = url, path, body
        self.events: list[str] = []
        self.answer: httpx.Response | None = None
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self.url}{self.path}", json=self.body, timeout=60) as answer:
            if answer.status_code == 200:
                self.events.extend(line for line in answer.iter_lines() if line)
            else:
                answer.read()
            self.answer = answer
        self.ended_at = time.monotonic()


@pytest.mark.long
def test_a_suspended_engine_holds_up_no_client_of_any_api_and_goes_on(
    server: ServerProcess, http: httpx.Client
) -> None:
    session, twin = open_session(http), open_session(http)
    said = [generate(http, each, PROMPT)["token_ids"] for each in (session, twin)]
    engine, restarts = engine_of(server), metric(http, "djinn_engine_restarts_total")
    turn = {"token_ids": PROMPT, "ignore_eos": True, **LONG}
    paths = {f"/v1/sessions/{session}/generate": turn, **CALLS}
    with suspended(engine):
        began = time.monotonic()
        waiting = [Asked(server.url, path, {**body, "stream": False}) for path, body in paths.items()]
        wait_until(lambda: http.get("/ready").status_code == 503, READY_S + SLACK_S)
        assert "said nothing for" in assert_error(http.get("/ready"), 503, "engine_stalled")
        for path, body in CALLS.items():
            asked_at = time.monotonic()
            refused = http.post(path, json=body)
            assert refused.status_code == (529 if path == "/v1/messages" else 503), refused.text
            assert refused.headers["Retry-After"] == "2"
            assert time.monotonic() - asked_at < AT_ONCE_S
        for each in waiting:
            each.join(60)
            assert each.ended_at - began < TURNS_S + SLACK_S
            assert each.answer is not None
            assert each.answer.headers["Retry-After"] == "2"
            if each.path == "/v1/messages":
                assert "makes no progress" in assert_messages_error(each.answer, 529)
            else:
                assert "makes no progress" in assert_error(each.answer, 503, "engine_stalled")
        assert http.get("/health").status_code == 200
    until_ready(http)
    assert engine.is_running()
    assert metric(http, "djinn_engine_restarts_total") == restarts
    said += [generate(http, each, PROMPT)["token_ids"] for each in (session, twin)]
    assert said[0::2] == said[1::2]


@pytest.mark.long
def test_streams_that_have_begun_end_with_an_error_event(server: ServerProcess, http: httpx.Client) -> None:
    session, engine = open_session(http), engine_of(server)
    turn = {"token_ids": PROMPT, "ignore_eos": True, **LONG}
    paths = {f"/v1/sessions/{session}/generate": turn, **CALLS}
    asked = [Asked(server.url, path, {**body, "stream": True}) for path, body in paths.items()]
    wait_until(lambda: all(len(each.events) > 4 for each in asked))
    with suspended(engine):
        began = time.monotonic()
        for each in asked:
            each.join(60)
            assert each.ended_at - began < TURNS_S + SLACK_S
    for each in asked:
        last = json.loads([line for line in each.events if line.startswith("data: {")][-1].removeprefix("data: "))
        assert "makes no progress" in json.dumps(last), (each.path, last)
    until_ready(http)


@pytest.mark.long
def test_a_front_door_places_no_call_on_a_replica_whose_engine_hangs(tmp_path: Path) -> None:
    flags = ("--replica",)
    with (
        serve_process(tmp_path / "a", *flags, "a", own_engine=True) as a,
        serve_process(tmp_path / "b", *flags, "b", own_engine=True) as b,
        serving_door({"a": a.url, "b": b.url}) as door,
        httpx.Client(base_url=door.url, timeout=60) as http,
    ):
        open_session(http)  # so that the other has more room
        with suspended(engine_of(a)):
            wait_until(lambda: http.get("/ready").json()["replicas"]["a"] == "refuses", READY_S + SLACK_S)
            call = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
            assert {http.post("/v1/completions", json=call).status_code for _ in range(30)} == {200}
        wait_until(lambda: http.get("/ready").json()["replicas"] == {"a": "ready", "b": "ready"})
