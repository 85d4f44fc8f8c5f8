"""A server whose engine is cut over two processes, one of which dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.durability.restarting import generate, open_session
from tests.engine_process.test_engine_process import (
    BACK_S,
    PROMPT,
    engine_of,
    running_turn,
    tokens_of,
    until,
    until_ready,
)
from tests.processes import ServerProcess, serve_process

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("ranks") / "state"
    flags = ("--tensor-parallel", "2", "--engine-timeout-s", "5")
    with serve_process(folder, *flags, own_engine=True) as server:
        yield server


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=BACK_S) as http:
        until_ready(http)
        yield http


def rank_of(server: ServerProcess) -> psutil.Process:
    """The process of rank 1."""
    [found] = engine_of(server).children()
    return found


def test_the_engine_dies_with_a_rank_and_comes_back(server: ServerProcess, http: httpx.Client) -> None:
    session = open_session(http)
    said = generate(http, session, PROMPT)["token_ids"]
    before = tokens_of(http, session)
    engine, rank = engine_of(server), rank_of(server)
    thread, answers = running_turn(http, session)
    rank.kill()
    thread.join(BACK_S)
    [answer] = answers
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
    assert "rank 1 was ended by SIGKILL" in answer.json()["error"]["message"]
    until(lambda: not engine.is_running())
    until_ready(http)
    assert tokens_of(http, session) == before
    assert generate(http, open_session(http), PROMPT)["token_ids"] == said


def test_a_rank_that_hangs_ends_the_engine_and_then_ends(server: ServerProcess, http: httpx.Client) -> None:
    engine, rank = engine_of(server), rank_of(server)
    os.kill(rank.pid, signal.SIGSTOP)
    answer = http.post(f"/v1/sessions/{open_session(http)}/generate", json={"token_ids": PROMPT, "max_tokens": 3})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
    assert "no progress for" in answer.json()["error"]["message"]
    os.kill(rank.pid, signal.SIGCONT)
    until(lambda: not (engine.is_running() or rank.is_running()))
    until_ready(http)


def test_ranks_end_with_the_server(server: ServerProcess, http: httpx.Client) -> None:
    rank = rank_of(server)
    generate(http, open_session(http), PROMPT)
    server.terminate()
    assert not rank.is_running()
