"""A server that shuts down hands its sessions to the others, and nobody who asks any of them notices."""

import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from app.cluster.moves import departures, draining
from tests.cluster.pair import PROMPT, behind, code, pair, used_session
from tests.cluster.traps import set_trap
from tests.durability.restarting import generate, open_session
from tests.waiting import wait_until

TERM, INT = signal.SIGTERM, signal.SIGINT
TURNS, SESSIONS, BEFORE = 10, 4, 3
"""Turns of each session, and how many of them are over when the drain begins."""


def test_a_drain_under_load_fails_no_turn_nor_recomputes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "FAREWELL_S", draining.FAREWELL_S / 3)
    with pair(tmp_path) as servers, behind(servers) as http:
        sessions = [open_session(servers.a) for _ in range(SESSIONS)]

        def talk(session: str) -> list[Any]:
            turns = []
            for number in range(TURNS):
                if number == BEFORE:
                    begun.append(session)
                turns.append(generate(http, session, PROMPT if number == 0 else [number], max_tokens=3))
            return turns

        def come() -> list[str]:
            return [open_session(http) for _ in range(10)]

        begun: list[str] = []
        with ThreadPoolExecutor(SESSIONS + 1) as threads:
            talks = [threads.submit(talk, each) for each in sessions]
            wait_until(lambda: len(begun) == SESSIONS)
            servers.tell_to_end("a")
            new = threads.submit(come).result()
            for turns in (each.result() for each in talks):
                cached = [turn["usage"]["cached_tokens"] for turn in turns[1:]]
                assert cached == [len(PROMPT) + 2 + 4 * number for number in range(TURNS - 1)]
        log = servers.ended("a")
        assert f"sessions have left: {SESSIONS + sum(each.startswith('ses_a_') for each in new)} to b" in log
        for session in sessions + new:
            assert http.get(f"/v1/sessions/{session}").json()["usage"]["tokens_recomputed"] == 0


@pytest.mark.usefixtures("brief_farewells")
@pytest.mark.parametrize(("flags", "how", "offers"), [(("--drain-to", "disk"), TERM, 0), ((), INT, 0), ((), TERM, 1)])
def test_what_is_to_stay_or_cannot_leave_stays(
    tmp_path: Path, flags: tuple[str, ...], how: signal.Signals, offers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = AsyncMock(side_effect=ValueError("a bug"))
    monkeypatch.setattr(departures, "connect", offer)
    with pair(tmp_path, flags={"a": flags}) as servers:
        session = used_session(servers.a)
        servers.tell_to_end("a", how)
        servers.ended("a")
        assert offer.await_count == offers
        servers.start("a")
        assert servers.owners(session) == ["a"]
        assert generate(servers.a, session, [9])["usage"]["cached_tokens"] == len(PROMPT) + 7


@pytest.mark.usefixtures("brief_farewells")
def test_files_wait_for_their_replica_whatever_the_store_forgets(tmp_path: Path) -> None:
    with pair(tmp_path) as servers:
        with behind(servers) as http:
            form: Any = {"file": ("kept.txt", b"kept"), "purpose": (None, "user_data")}
            path = f"/v1/files/{http.post('/v1/files', files=form).raise_for_status().json()['id']}"
        has, other = sorted(servers.clients, key=lambda name: servers.clients[name].get(path).status_code)
        servers.tell_to_end(has)
        servers.ended(has)
        with behind(servers, other) as http:
            assert code(http.get("/v1/files")) == (503, "replica_away")
        servers.end(other)
        with sqlite3.connect(tmp_path / "cluster/cluster.sqlite3") as store:
            assert store.execute("DELETE FROM entry WHERE key LIKE 'place/files%'").rowcount == 1
        for name in (has, other):
            servers.start(name)
        with behind(servers, other) as http:
            assert http.get(path).json()["filename"] == "kept.txt"


@pytest.mark.usefixtures("brief_farewells")
def test_a_paused_turn_goes_on_elsewhere(tmp_path: Path) -> None:
    with pair(tmp_path) as servers, behind(servers) as http:
        session = open_session(servers.a)
        stop = {"layer": 2, "action": "pause", "when": {"pass": "decode", "position": 44}, "timeout_s": 500}
        http.post(f"/v1/sessions/{session}/breakpoints", json=stop).raise_for_status()
        assert generate(http, session, PROMPT)["status"] == "paused"
        servers.tell_to_end("a")
        assert http.post(f"/v1/sessions/{session}/resume", json={}).json()["status"] == "finished"
        servers.ended("a")
        assert servers.owners(session) == ["b"]


@pytest.mark.long
@pytest.mark.usefixtures("brief_farewells")
def test_what_a_full_peer_refuses_stays_for_a_restart(tmp_path: Path) -> None:
    with pair(tmp_path, flags={"b": ("--max-sessions", "2")}) as servers:
        sessions = [used_session(servers.a) for _ in range(5)]
        servers.tell_to_end("a")
        assert "sessions have left: 2 to b; that stay here: 3" in servers.ended("a")
        servers.start("a")
        homes = [servers.settled(each) for each in sessions]
        assert sorted(homes) == ["a", "a", "a", "b", "b"]
        for session, home in zip(sessions, homes, strict=True):
            assert generate(servers.clients[home], session, [9])["usage"]["cached_tokens"] == len(PROMPT) + 7


@pytest.mark.long
def test_a_peer_that_dies_meanwhile_loses_nothing(tmp_path: Path) -> None:
    with pair(tmp_path, start=False, as_processes=True) as servers:
        servers.start("a", "--drain-timeout-s", "6")
        servers.start("b", prepare=partial(set_trap, "b is to take it"))
        sessions = [used_session(servers.a) for _ in range(5)]
        servers.tell_to_end("a")
        servers.ended("a")
        assert servers.processes["b"].exit_status(60) == -9
        servers.end("b")
        for name in ("a", "b"):
            servers.start(name)
        for session in sessions:
            home = servers.clients[servers.settled(session)]
            assert home.get(f"/v1/sessions/{session}").json()["tokens"] == len(PROMPT) + 8
            assert generate(home, session, [9])["status"] == "finished"


@pytest.mark.usefixtures("brief_farewells")
def test_servers_that_all_end_at_once_keep_what_they_have(tmp_path: Path) -> None:
    with pair(tmp_path) as servers:
        sessions = {open_session(servers.clients[name]): name for name in ("a", "b", "a", "b")}
        for session, name in sessions.items():
            generate(servers.clients[name], session, PROMPT)
        for act in (servers.tell_to_end, servers.ended, servers.start):
            for name in ("a", "b"):
                act(name)
        for session in sessions:
            home = servers.settled(session)
            assert generate(servers.clients[home], session, [9])["usage"]["cached_tokens"] == len(PROMPT) + 7


def test_a_resume_that_is_refused_has_edited_nothing(tmp_path: Path) -> None:
    with pair(tmp_path, start=False) as servers:
        http = servers.start("a")
        session = open_session(http)
        stop = {"layer": 2, "action": "pause", "when": {"pass": "prefill"}, "timeout_s": 500}
        http.post(f"/v1/sessions/{session}/breakpoints", json=stop).raise_for_status()
        assert generate(http, session, PROMPT)["status"] == "paused"
        states = partial(http.get, f"/v1/sessions/{session}/checkpoint/activation")
        before = states().raise_for_status().content
        servers.tell_to_end("a")  # nobody is there who would take the session
        wait_until(lambda: http.get("/ready").status_code == 503)
        answer = http.post(f"/v1/sessions/{session}/resume", json={"edits": [{"op": "scale", "factor": 2.0}]})
        assert code(answer) == (409, "moving")
        assert states().content == before
        servers.ended("a")


@pytest.mark.long
@pytest.mark.usefixtures("brief_farewells")
def test_a_server_with_sessions_that_cannot_leave_is_asked_for_them_to_its_end(tmp_path: Path) -> None:
    with pair(tmp_path) as servers:
        http = servers.a
        stays, leaves = open_session(http), open_session(http)
        http.post(f"/v1/sessions/{stays}/breakpoints", json={"layer": 2, "action": "capture"}).raise_for_status()
        for session in (stays, leaves):
            generate(http, session, PROMPT)
        servers.tell_to_end("a")
        wait_until(lambda: http.get(f"/v1/sessions/{leaves}").status_code == 421)
        for _ in range(20):
            wait_until(lambda: http.get(f"/v1/sessions/{stays}").status_code == 200)  # 409 while it is offered
        servers.ended("a")
