"""Servers that outlive the command that started them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from loadgen.errors import LoadgenError
from loadgen.peers import background
from loadgen.peers.base import ServerSettings
from loadgen.processes.process import ServerFailedError, free_port
from tests.loadgen.peers.fakes import DIES, FakePeer

PEER = FakePeer()


@pytest.fixture(autouse=True)
def stopped(cache: Path) -> Iterator[None]:
    """Nothing that a test started is left."""
    yield
    if background.running(PEER) is not None:
        background.stop(PEER)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_started_server_answers_until_it_is_stopped_with_all_of_its_processes(settings: ServerSettings) -> None:
    port = free_port()

    served = background.start(PEER, settings, port)

    assert served.url == f"http://127.0.0.1:{port}"
    assert served.target == f"fake={served.url}#model"
    assert httpx.get(f"{served.url}/v1/models").is_success
    note = background.running(PEER)
    assert note is not None
    assert (note.pid, note.url) == (served.pid, served.url)
    child = re.fullmatch(rf"child (\d+) of {port}", served.log.read_text().splitlines()[0])
    assert child is not None
    assert is_running(int(child[1]))

    assert background.stop(PEER) == note

    assert background.running(PEER) is None
    assert not is_running(served.pid)
    assert not is_running(int(child[1]))


def test_one_of_a_kind_at_a_time(settings: ServerSettings) -> None:
    served = background.start(PEER, settings, None)
    with pytest.raises(LoadgenError, match=rf"running already, as process {served.pid} on {served.url}"):
        background.start(PEER, settings, None)
    assert httpx.get(f"{served.url}/v1/models").is_success


def test_what_does_not_run_cannot_be_stopped() -> None:
    with pytest.raises(LoadgenError, match="fake is not running"):
        background.stop(PEER)


def test_what_is_not_installed_is_not_started(settings: ServerSettings) -> None:
    with pytest.raises(LoadgenError, match="not installed: python -m loadgen peers install fake"):
        background.start(FakePeer(installed=False), settings, None)


def test_a_taken_port_is_named(settings: ServerSettings) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LoadgenError, match=f"port {port} is taken"):
            background.start(PEER, settings, port)


def test_a_server_that_dies_during_its_start_is_reported_with_its_last_words(settings: ServerSettings) -> None:
    with pytest.raises(ServerFailedError, match=r"ended with status 1; the end of \S+fake.log:\nno such model"):
        background.start(FakePeer(DIES), settings, None)
    assert background.running(PEER) is None


def test_a_server_that_was_killed_can_be_started_again(settings: ServerSettings) -> None:
    first = background.start(PEER, settings, None)
    os.killpg(first.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while background.running(PEER) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)

    second = background.start(PEER, settings, None)

    assert httpx.get(f"{second.url}/v1/models").is_success


def test_another_process_that_got_the_pid_is_left_alone(cache: Path) -> None:
    """The note names this very process, but another start time."""
    note = cache / "running/fake.json"
    note.parent.mkdir(parents=True)
    note.write_text(json.dumps({"pid": os.getpid(), "created_s": time.time() - 3600, "url": "http://127.0.0.1:9"}))

    with pytest.raises(LoadgenError, match="fake is not running"):
        background.stop(PEER)

    assert not note.exists()


@pytest.mark.parametrize("text", ["", "{}", '{"pid": "x"}'])
def test_a_note_that_cannot_be_read_is_none(cache: Path, text: str) -> None:
    note = cache / "running/fake.json"
    note.parent.mkdir(parents=True)
    note.write_text(text)

    assert background.running(PEER) is None
    assert not note.exists()
