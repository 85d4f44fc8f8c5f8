"""What a reader of `GET /v1/events` is told, of which sessions, and for how long."""

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from app import events as streams
from app.domain.values import SessionState, Ticket
from app.events import KEPT, Scope
from app.messages import Token
from app.routers.dependencies import Services
from app.sessions.session import Session
from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.events.streaming import ids, reading
from tests.orderly import serve_thread
from tests.serving import serve
from tests.tenants.tenant_files import Clock, key, tenant, write_tenants
from tests.waiting import wait_until


def create(http: httpx.Client, tenant: str = "") -> str:
    answer = http.post("/v1/sessions", json={"metadata": {"for": tenant}}, headers={"X-Api-Key": tenant})
    session: str = answer.raise_for_status().json()["id"]
    return session


def generate(http: httpx.Client, session: str, **fields: Any) -> dict[str, Any]:
    body = {"token_ids": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, **fields}
    turn: dict[str, Any] = http.post(f"/v1/sessions/{session}/generate", json=body).raise_for_status().json()
    return turn


def test_a_session_is_followed_from_its_opening_to_its_end(serve_with: ServeWith) -> None:
    http = serve_with()
    before = create(http)
    with reading(http) as reader:
        assert ids(reader.next()) == {before}
        session = create(http)
        opened = reader.until("session", change="opened")[-1][1]["session"]
        assert opened["id"] == session
        told = reader.until("memory") + reader.until("memory")
        assert all("changed" not in data.values() for _, data in told), "nothing has"
        turn = generate(http, session)
        begun = reader.until("turn")[-1][1]
        assert begun.pop("time") <= time.time()
        nothing_yet = dict.fromkeys(("finish_reason", "usage", "recompute_reason", "resume_ms", "code"))
        assert begun == {"session_id": session, "status": "begun", **nothing_yet}
        ended = reader.until("turn", session_id=session, status="finished")[-1][1]
        assert (ended["finish_reason"], ended["usage"]) == ("length", turn["usage"])
        changed = reader.until("session", change="changed")[-1][1]["session"]
        while changed["kv"]["tier"] != "device" or changed["state"] != "idle":
            changed = reader.until("session", change="changed")[-1][1]["session"]
        assert ended["resume_ms"] == changed["usage"]["resume_ms"]
        assert changed == http.get(f"/v1/sessions/{session}").json()
        assert changed["tokens"] == 7
        http.post(f"/v1/sessions/{session}/phase", json={"phase": "io_wait"})
        assert reader.until("session", change="changed")[-1][1]["session"]["phase"] == "io_wait"
        http.delete(f"/v1/sessions/{session}")
        assert reader.until("session", change="closed")[-1][1]["session"]["id"] == session


def test_a_pause_and_edits_of_its_checkpoint_are_told(serve_with: ServeWith) -> None:
    http = serve_with()
    session = create(http)
    http.post(f"/v1/sessions/{session}/breakpoints", json={"layer": 1, "action": "pause", "once": True})
    path = f"/v1/sessions/{session}/checkpoint"
    with reading(http) as reader:
        generate(http, session)
        told = reader.until("pause", session_id=session)[-1][1]["checkpoint"]
        assert {**told, "age_s": 0} == {**http.get(path).json(), "age_s": 0}
        held = http.get(f"{path}/activation").content
        http.post(f"{path}/edit", json={"edits": [{"op": "scale", "factor": 0.5}]}).raise_for_status()
        assert reader.until("edit", session_id=session)[-1][1]["layer"] == 1
        assert http.post(f"{path}/edit", json={"edits": [{"op": "scale", "factor": "x"}]}).status_code == 422
        http.put(f"{path}/activation", content=held).raise_for_status()
        assert reader.until("edit", session_id=session)[-1][1]["layer"] == 1
        http.post(f"/v1/sessions/{session}/resume", json={})
        reader.until("turn", session_id=session, status="finished")


def test_memory_is_told_every_second_as_the_route_has_it(serve_with: ServeWith) -> None:
    http = serve_with()
    generate(http, create(http))
    with reading(http) as reader:
        first = reader.until("memory")[-1][1]
        second = reader.until("memory")[-1][1]
        assert first == second == http.get("/v1/memory").json()
        assert "djinn_event_streams 1.0" in http.get("/metrics").text.splitlines()


def test_a_reader_that_comes_back_misses_nothing(serve_with: ServeWith) -> None:
    http = serve_with()
    with reading(http) as reader:
        reader.until("memory")
        last_id = reader.last_id
        sessions = [create(http) for _ in range(3)]
        before = reader.until("session", change="opened")[-1]
    http.delete(f"/v1/sessions/{sessions[0]}")
    with reading(http, last_id) as reader:
        told = reader.until("session", change="closed")
    assert before in told, "an event that is sent again keeps its time"
    assert "snapshot" not in [name for name, _ in told]
    opened = [data["session"]["id"] for name, data in told if name == "session" and data["change"] == "opened"]
    assert opened == sessions


def test_an_id_of_another_start_gets_a_snapshot(http: httpx.Client, serve_with: ServeWith) -> None:
    with reading(serve_with()) as reader:
        reader.until("memory")
        last_id = reader.last_id
    session = create(http)
    for other in (last_id, "", "1", "abcdef12-5", "-", "x" * 1000):
        with reading(http, other) as reader:
            assert session in ids(reader.next())
    http.delete(f"/v1/sessions/{session}")
    assert_error(http.get("/v1/events", params={"since": "1"}), 422, "field_out_of_range", param="since")


def test_a_large_snapshot_comes_in_parts(serve_with: ServeWith) -> None:
    http = serve_with(max_sessions=2000)
    sessions = {create(http) for _ in range(streams.SNAPSHOT_PART + 1)}
    with reading(http) as reader:
        parts = [reader.next() for _ in range(2)]
    assert [(name, data["has_more"]) for name, data in parts] == [("snapshot", True), ("snapshot", False)]
    assert reader.last_id
    assert ids(parts[0]) | ids(parts[1]) == sessions


def test_too_many_streams_are_told_when_to_come_back(serve_with: ServeWith) -> None:
    http = serve_with()
    with ExitStack() as open_streams:
        for _ in range(streams.OF_TENANT):
            open_streams.enter_context(reading(http))
        refused = http.get("/v1/events")
        assert_error(refused, 429, "stream_limit")
        assert int(refused.headers["retry-after"]) >= 1
    wait_until(lambda: "djinn_event_streams 0.0" in http.get("/metrics").text.splitlines())
    with reading(http) as reader:
        reader.next()


def test_a_tenant_hears_of_its_own_and_an_operator_of_all(serve_with: ServeWith, tmp_path: Path) -> None:
    roles = {"alice": "user", "bob": "user", "olga": "operator", "graf": "metrics"}
    file = write_tenants(tmp_path / "tenants.json", *(tenant(name, role=role) for name, role in roles.items()))
    http = serve_with(tenants=file)
    assert_error(http.get("/v1/events", headers={"X-Api-Key": "graf"}), 403, "wrong_role")
    assert_error(http.get("/v1/events"), 401, "invalid_api_key")
    mine = create(http, "alice")
    with (
        reading(http, **{"X-Api-Key": "alice"}) as alice,
        reading(http, **{"X-Api-Key": "bob"}) as bob,
        reading(http, **{"X-Api-Key": "olga"}) as olga,
    ):
        assert [ids(each.next()) for each in (alice, bob, olga)] == [{mine}, set(), {mine}]
        bobs = create(http, "bob")
        create(http, "alice")
        told = [each.until("session", change="opened") for each in (alice, bob, olga)]
        opened = [each[-1][1]["session"] for each in told]
        assert [each["tenant"] for each in opened] == ["alice", "bob", "bob"]
        assert [each["metadata"] for each in opened] == [{"for": "alice"}, {"for": "bob"}, {}]
        http.delete(f"/v1/sessions/{bobs}", headers={"X-Api-Key": "bob"})
        http.delete(f"/v1/sessions/{mine}", headers={"X-Api-Key": "alice"})
        assert {data["session"]["id"] for name, data in alice.until("session", change="closed")[-1:]} == {mine}
        for _ in range(2):  # a figure of before would tell of bob too
            olga.until("session", change="closed")
        assert set(olga.until("memory")[-1][1]["tenants"]) == {"alice"}
        assert bob.until("memory")[-1][1]["tenants"] is None
        alices = alice.last_id
    with reading(http, alices, **{"X-Api-Key": "bob"}) as bob:
        assert bob.next()[0] == "snapshot"


def test_the_stream_ends_with_its_key(tmp_path: Path) -> None:
    clock = Clock()
    file = write_tenants(tmp_path / "tenants.json", tenant("alice", key("old", not_after="2027-01-15T09:00:00Z")))
    with serve(tenants=file, clock=clock) as url, httpx.Client(base_url=url, timeout=30) as http:
        headers = {"X-Api-Key": "old"}
        with reading(http, **headers) as reader:
            reader.until("memory")
            clock.now += 10 * 24 * 3600
            reader.read_on()


def test_the_end_of_the_server_is_the_end_of_the_stream(tmp_path: Path) -> None:
    body = {"token_ids": [5, 6], "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with serve_thread(tmp_path / "state", "--drain-timeout-s", "0.1") as (server, http):
        session = http.post("/v1/sessions").json()["id"]
        with reading(http) as reader, http.stream("POST", f"/v1/sessions/{session}/generate", json=body) as turn:
            reader.until("turn", status="begun")
            server.tell()
            assert reader.until("turn", status="finished")[-1][1]["finish_reason"] == "cancelled"
            reader.read_on()
            last_id = reader.last_id
            turn.read()
        assert server.exit_status(60) == 0
    with serve_thread(tmp_path / "state") as (_, http), reading(http, last_id) as reader:
        assert ids(reader.next()) == {session}


ALL = Scope(None)


def names(piece: bytes) -> list[str]:
    return [line[7:].decode() for line in piece.splitlines() if line.startswith(b"event: ")]


def data(piece: bytes) -> Any:
    return json.loads(next(line[6:] for line in piece.splitlines() if line.startswith(b"data: ")))


async def test_a_reader_that_is_too_slow_gets_a_fresh_snapshot(services: Services) -> None:
    with services.events.reading(ALL) as channel:
        events = services.events.events(ALL, channel, None, lambda: True)
        first = data(await anext(events))
        assert (first["sessions"], first["has_more"]) == ([], False)
        for _ in range(KEPT):
            services.sessions.drop(services.sessions.create())
        session = services.sessions.create()
        snapshot = await anext(events)
        assert names(snapshot) == ["snapshot"]
        assert [each["id"] for each in data(snapshot)["sessions"]] == [session.id]
        services.sessions.drop(session)
        while "session" not in names(piece := await anext(events)):
            pass
        assert b'"closed"' in piece
        await events.aclose()


def running(services: Services) -> Session:
    """A session with a turn in it that this test plays."""
    session = services.sessions.create()
    session.move(SessionState.QUEUED)
    session.move(SessionState.RUNNING)
    return session


async def test_a_running_turn_is_told_of_by_its_count_of_tokens(services: Services) -> None:
    with services.events.reading(ALL) as channel:
        events = services.events.events(ALL, channel, None, lambda: True)
        session, other = running(services), running(services)
        for number in range(30):
            session.observe(Token(Ticket(1), number))
        other.observe(Token(Ticket(1), 1))
        while "tokens" not in names(piece := await anext(events)):
            pass
        told = [part for part in piece.split(b"\n\n") if b"event: tokens" in part]
        assert [data(part)["tokens"] for part in told] == [{session.id: 30, other.id: 1}]
        assert piece.count(b"event: session") <= 4, "a token makes no view of its session"
        await events.aclose()
        for each in (session, other):
            each.move(SessionState.IDLE)
