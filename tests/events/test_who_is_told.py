"""Who hears of which sessions, and for how long."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.events.streaming import ids, reading
from tests.orderly import serve_thread
from tests.serving import serve
from tests.tenants.tenant_files import Clock, key, tenant, write_tenants


def create(http: httpx.Client, name: str) -> str:
    answer = http.post("/v1/sessions", json={"metadata": {"for": name}}, headers={"X-Api-Key": name})
    session: str = answer.raise_for_status().json()["id"]
    return session


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
        assert server.exit_status(15) == 0
    with serve_thread(tmp_path / "state") as (_, http), reading(http, last_id) as reader:
        assert ids(reader.next()) == {session}
