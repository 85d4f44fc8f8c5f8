"""A state folder that two machines reach, and one without room."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from app.web.server import FENCED
from tests.cluster.pair import PROMPT, code, pair, used_session
from tests.durability.restarting import generate, no_room, open_session
from tests.errors import assert_error
from tests.journal.building import held_up
from tests.journal.written import histories
from tests.orderly import serve_thread
from tests.processes import ServerProcess, serve_process
from tests.waiting import wait_until

SOON_S = 30


def be_on(machine: str, shared: bool) -> None:
    """Take the process to be on that machine, and its folder on a file system of several. Called in it, first."""
    from app.journal import journal

    setattr(journal, "machine_id", lambda: machine)  # noqa: B010 (they are no attributes to mypy)
    setattr(journal, "is_over_network", lambda folder: shared)  # noqa: B010


@contextmanager
def serving(
    folder: Path, machine: str, lease_s: str, *, shared: bool = False
) -> Iterator[tuple[ServerProcess, httpx.Client]]:
    """A server on that machine, which has the folder under a name of its own."""
    here = folder.with_name(machine)
    if not here.exists():
        folder.mkdir(exist_ok=True)
        here.symlink_to(folder)
    flags = ("--replica", "a", "--lease-s", lease_s)
    with (
        serve_process(here, *flags, prepare=partial(be_on, machine, shared)) as server,
        httpx.Client(base_url=server.url, timeout=SOON_S) as http,
    ):
        yield server, http


def frozen(server: ServerProcess, folder: Path) -> None:
    """Stop it, and lose its lock, as where locks do not reach other machines."""
    os.kill(server.pid, signal.SIGSTOP)
    (folder / "lock").unlink()


def outcome(asked: Future[httpx.Response]) -> tuple[int, str] | None:
    """The error's status and code; None if the server has ended before."""
    try:
        return code(asked.result(SOON_S))
    except httpx.TransportError:
        return None


def read_turn(url: str, session: str, said: list[str]) -> None:
    """Take a long turn, and note its stream as it comes."""
    body: dict[str, Any] = {"token_ids": [7], "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/sessions/{session}/generate", json=body, timeout=SOON_S) as answer:
        for part in answer.iter_text():
            said.append(part)  # noqa: PERF402 (another thread reads it meanwhile)


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True])
def test_a_frozen_server_answers_for_no_session_when_it_wakes(tmp_path: Path, shared: bool) -> None:
    folder = tmp_path / "state"
    with ExitStack() as ends:
        first, http = ends.enter_context(serving(folder, "one", "3", shared=shared))
        pool = ends.enter_context(ThreadPoolExecutor())
        session, other = open_session(http), open_session(http)
        history = [*PROMPT, *generate(http, session, PROMPT)["token_ids"]]
        before = [*PROMPT, *generate(http, other, PROMPT)["token_ids"]]
        said = list[str]()
        reading = pool.submit(read_turn, first.url, other, said)
        wait_until(lambda: any("event: token" in part for part in said))
        frozen(first, folder)
        ends.callback(first.kill)
        path = f"{first.url}/v1/sessions/{session}"
        turn = {"token_ids": [9], "max_tokens": 4}
        asked = [
            pool.submit(httpx.get, path, timeout=SOON_S),
            pool.submit(httpx.get, f"{path}/history", timeout=SOON_S),
            pool.submit(httpx.post, f"{path}/generate", json=turn, timeout=SOON_S),
            pool.submit(httpx.post, f"{path}/move", json={"replica": "b"}, timeout=SOON_S),
            pool.submit(httpx.post, f"{first.url}/v1/sessions", json={}, timeout=SOON_S),
        ]
        second, there = ends.enter_context(serving(folder, "two", "60", shared=shared))
        assert "the start waits" in second.output.read_text()
        for found, expected in ((session, history), (other, before)):
            assert there.get(f"/v1/sessions/{found}/history").json()["token_ids"] == expected
        history += [9, *generate(there, session, [9])["token_ids"]]
        assert "djinn_lease_epoch 2.0" in there.get("/metrics").text
        os.kill(first.pid, signal.SIGCONT)
        assert {outcome(each) for each in asked} <= {(503, "fenced"), None}
        assert isinstance(reading.exception(SOON_S), httpx.TransportError)
        assert not any("event: finished" in part for part in said)
        assert first.exit_status(SOON_S) == FENCED
        assert "another server has taken the state folder" in first.output.read_text()
        history += [11, *generate(there, session, [11])["token_ids"]]
        second.terminate()
    assert histories(folder) == {session: history, other: before}


def test_a_server_that_cannot_write_is_fenced_until_it_can(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serve_thread(folder, "--replica", "a", "--lease-s", "3") as (_, http):
        session = open_session(http)
        with connect(f"{str(http.base_url).replace('http', 'ws')}/v1/responses") as socket, held_up(folder):
            wait_until(lambda: http.get("/ready").status_code == 503)
            socket.send("{}")
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(SOON_S)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "fenced")
            assert code(http.get("/ready")) == (503, "fenced")
            assert code(http.get(f"/v1/sessions/{session}")) == (503, "fenced")
            move = http.post(f"/v1/sessions/{session}/move", json={"replica": "b"})
            assert code(move) == (503, "fenced")
            assert move.headers["retry-after"]
            assert http.get("/health").status_code == 200
            assert "djinn_lease_held 0.0" in http.get("/metrics").text
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert generate(http, session, PROMPT)["status"] == "finished"
        assert "djinn_lease_held 1.0" in http.get("/metrics").text


LEASE_S = 2.0


@pytest.mark.long
def test_a_server_without_room_for_its_journal_still_answers(tmp_path: Path) -> None:
    flags = ("--lease-s", f"{LEASE_S:g}")
    with pair(tmp_path, as_processes=True, flags={"a": flags, "b": flags}) as servers:
        full, other = servers.a, servers.b
        here, there = used_session(full), used_session(other)
        with no_room(servers.processes["a"], tmp_path / "a"):
            failed = full.post(f"/v1/sessions/{here}/generate", json={"token_ids": [9], "max_tokens": 4})
            assert code(failed) == (500, "not_durable")
            end = time.monotonic() + 2 * LEASE_S  # leases that could not be renewed in the journal
            while time.monotonic() < end:
                assert full.get(f"/v1/sessions/{here}").status_code == 200
                assert "djinn_lease_held 1.0" in full.get("/metrics").text
                time.sleep(0.05)
            assert_error(servers.move(here), 503, "journal_unavailable")
            assert_error(servers.move(there, "b", "a"), 503, "peer_full")
            assert servers.owners(here) == ["a"]
            assert servers.owners(there) == ["b"]
        wait_until(lambda: full.get("/ready").status_code == 200)
        servers.moved(here)
        servers.moved(there, "b", "a")
        assert "lease" not in servers.processes["a"].output.read_text()
