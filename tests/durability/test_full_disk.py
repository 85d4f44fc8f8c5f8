"""A disk without room: what is said was done was done, and the journal goes before every other file."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

import client
from app.web.server import NOT_DURABLE
from tests.durability.restarting import generate, no_room, open_session, serving
from tests.errors import assert_error
from tests.file_sizes import free_on_disks
from tests.processes import metric, serve_process
from tests.waiting import wait_until

MIB = 1 << 20
TURN = {"token_ids": [5], "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def test_a_full_disk_is_told_as_it_is_and_ends_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serve_process(folder) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        session, closing = open_session(http), open_session(http)
        path = f"/v1/sessions/{session}"
        # Kernels may have to be compiled, and kept in files.
        before = [5, *generate(http, session, [5], 2)["token_ids"]]
        assert http.get("/ready").status_code == 200
        with no_room(server, folder):
            answer = http.post(f"{path}/generate", json=TURN)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_durable")
            turn = answer.json()["turn"]
            assert (turn["status"], len(turn["token_ids"]), turn["usage"]["completion_tokens"]) == ("finished", 2, 2)
            assert http.get(f"{path}/history").json()["token_ids"] == [*before, 5, *turn["token_ids"]]
            with connect_sse(http, "POST", f"{path}/generate", json=TURN | {"stream": True}) as source:
                *_, last = source.iter_sse()
            assert (last.event, last.json()["error"]["code"]) == ("error", "not_durable")
            assert len(last.json()["turn"]["token_ids"]) == 2
            for opening in ("/v1/sessions", f"{path}/fork"):
                assert "no session was opened" in assert_error(http.post(opening), 503, "journal_unavailable")
            watch = {"layer": 0, "action": "pause"}
            unarmed = assert_error(http.post(f"{path}/breakpoints", json=watch), 503, "journal_unavailable")
            assert "no breakpoint was armed" in unarmed
            assert http.get(f"{path}/breakpoints").json()["data"] == []
            closed = assert_error(http.delete(f"/v1/sessions/{closing}"), 500, "not_durable")
            assert "is closed, but a restart would bring it back" in closed
            assert [view["id"] for view in http.get("/v1/sessions").json()["data"]] == [session]
            assert "journal" in assert_error(http.get("/ready"), 503, "journal_unavailable")
            assert metric(http, "djinn_journal_failing") == 1
            assert metric(http, "djinn_journal_waiting") >= 1
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert metric(http, "djinn_journal_failing") == metric(http, "djinn_journal_waiting") == 0
        with no_room(server, folder), client.Djinn(server.url) as djinn:
            with pytest.raises(client.ServerError) as told:
                djinn.sessions.get(session).generate(token_ids=[5], max_tokens=2, ignore_eos=True)
            assert told.value.turn is not None
            server.terminate()
            assert server.exit_status(0) == NOT_DURABLE
    log = folder.with_name("state.out").read_text()
    assert log.count("the journal cannot be written") == 2
    assert log.count("the journal is written again") == 1
    assert "Traceback" not in log
    assert log.splitlines()[-1].endswith("ERROR djinn: drain: over; changes that the journal lacks: 1")
    with serving(folder) as http:
        assert [(view["id"], view["tokens"]) for view in http.get("/v1/sessions").json()["data"]] == [(session, 9)]
        assert "killed" not in [each["kind"] for each in http.get("/v1/findings").json()["data"]]


class FullDisk:
    """What is free on every disk, as far as the server asks. Files of the server count."""

    def __init__(self, folder: Path, total: int) -> None:
        self.folder = folder
        self.total = total

    def free_bytes(self) -> int:
        return max(0, self.total - sum(self.sizes()))

    def sizes(self) -> Iterator[int]:
        for folder, _, names in os.walk(self.folder):  # passes over a folder that is removed meanwhile
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    yield Path(folder, name).stat().st_size


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    """A disk of 8 MiB with the folder `state`."""
    found = FullDisk(tmp_path / "state", 8 * MIB)
    free_on_disks(monkeypatch, found.free_bytes)
    return found


def kv_files(disk: FullDisk) -> int:
    return len(list((disk.folder / "kv").glob("*.safetensors")))


def idle_session(http: httpx.Client, seed: int) -> str:
    """A session of 500 tokens whose KV wants to go to the disk: half a MiB of it."""
    session = open_session(http)
    generate(http, session, [(seed * 31 + index) % 500 for index in range(500)], 1)
    http.post(f"/v1/sessions/{session}/phase", json={"phase": "idle"}).raise_for_status()
    return session


def served(disk: FullDisk) -> Any:
    return serving(disk.folder, kv_disk=64 * MIB, disk_reserve=4 * MIB)


def test_kv_files_give_way_when_something_else_fills_the_disk(full_disk: FullDisk) -> None:
    with served(full_disk) as http:
        sessions = [idle_session(http, seed) for seed in range(3)]
        wait_until(lambda: kv_files(full_disk) == 3)
        full_disk.total = sum(full_disk.sizes()) + 4 * MIB - 1
        wait_until(lambda: kv_files(full_disk) == 2)
        full_disk.total = sum(full_disk.sizes())
        wait_until(lambda: kv_files(full_disk) == 0)
        for session in sessions:
            assert generate(http, session, [7], 1)["usage"]["prompt_tokens"] == 502


def test_a_file_that_does_not_fit_is_refused_before_it_is_sent(full_disk: FullDisk) -> None:
    with served(full_disk) as http:
        session = open_session(http)
        generate(http, session, list(range(100)), 1)
        content = http.get(f"/v1/sessions/{session}/export").raise_for_status().content
        assert http.post("/v1/sessions/import", content=content).status_code == 201
        full_disk.total = sum(full_disk.sizes()) + 4 * MIB + len(content) // 2
        before = len(http.get("/v1/sessions").json()["data"])
        for whole in (content, iter([content])):
            refused = assert_error(http.post("/v1/sessions/import", content=whole), 503, "disk_full")
            assert "for the journal" in refused
        assert_error(http.get(f"/v1/sessions/{session}/export"), 503, "disk_full")
        assert len(http.get("/v1/sessions").json()["data"]) == before
        full_disk.total = 64 * MIB
        assert http.post("/v1/sessions/import", content=content).status_code == 201
