"""Answers about the whole cluster are made of those of all replicas."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.cluster.front.merged.event_ids import joined_id, split_id
from app.cluster.front.merged.merging import merged_memory, merged_page
from tests.cluster.front.doors import PATIENCE_S, Door, serving_door
from tests.events.streaming import ids, reading
from tests.serving import serve


@pytest.fixture
def sessions(client: httpx.Client) -> Iterator[list[str]]:
    """Seven sessions at both replicas, in the order of their ids."""
    found = sorted(client.post("/v1/sessions", json={}).json()["id"] for _ in range(7))
    yield found
    for session in found:
        client.delete(f"/v1/sessions/{session}")


def test_the_list_has_every_session_once_and_in_order(client: httpx.Client, sessions: list[str]) -> None:
    listed: list[str] = []
    while True:
        after = {"after": listed[-1]} if listed else {}
        page = client.get("/v1/sessions", params={"limit": 2, **after}).json()
        listed += [session["id"] for session in page["data"]]
        if not page["has_more"]:
            break
        assert len(page["data"]) == 2
    assert listed == sorted(listed)
    assert [session for session in listed if session in sessions] == sessions
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "after=nonsense", "state=odd", "what=1"])
def test_a_list_that_no_replica_gives_is_refused(client: httpx.Client, query: str) -> None:
    assert client.get(f"/v1/sessions?{query}").status_code == 422


@pytest.mark.parametrize("path", ["/v1/sessions", "/version"])
def test_an_old_client_that_names_no_host_is_answered(door: Door, path: str) -> None:
    with socket.create_connection(door.address, timeout=PATIENCE_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_models_memory_and_metrics_are_those_of_all(client: httpx.Client, replica_urls: dict[str, str]) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny-llama"]
    parts = [httpx.get(f"{url}/v1/memory").json() for url in replica_urls.values()]
    whole = client.get("/v1/memory").json()
    total = sum(part["data"]["device"]["total_bytes"] for part in parts)
    assert whole["data"]["device"]["total_bytes"] == total
    assert whole["data"]["block_tokens"] == parts[0]["data"]["block_tokens"]
    text = client.get("/metrics").text
    samples = {
        (sample.name, sample.labels["replica"])
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert {("djinn_turns_running", "a"), ("djinn_turns_running", "b"), ("djinn_connections", "front")} <= samples
    assert {("djinn_replica_up", "a"), ("djinn_replica_up", "b")} <= samples


def test_sums_leave_out_what_is_unknown() -> None:
    moved = {"bytes": 10, "seconds": 2.0, "bytes_per_s": 5.0}
    never = {"bytes": 0, "seconds": 0.0, "bytes_per_s": None}
    views = [
        {"moves": {"out": moved}, "block_bytes": 4, "counts": None, "tenants": {"x": {"sessions": 1}}},
        {"moves": {"out": never, "in": never}, "block_bytes": 4, "counts": None, "tenants": {"y": {"sessions": 2}}},
    ]
    assert merged_memory(views) == {
        "moves": {"out": moved, "in": never},
        "block_bytes": 4,
        "counts": None,
        "tenants": {"x": {"sessions": 1}, "y": {"sessions": 2}},
    }


def test_a_session_that_has_just_moved_is_listed_once() -> None:
    before = {"id": "ses_a_2", "used_at": 5.0, "state": "idle"}
    now = {**before, "used_at": 6.0, "state": "running"}
    other, last = {"id": "ses_a_1", "used_at": 9.0}, {"id": "ses_a_3", "used_at": 1.0}
    for pages in ([[other, before], [now, last]], [[now, last], [other, before]]):
        page = merged_page([{"data": each, "has_more": False} for each in pages], 3)
        assert page == {"data": [other, now, last], "has_more": False}


def test_who_may_not_ask_a_replica_gets_its_answer() -> None:
    with serve(replica="a", api_keys=("k" * 32,)) as url, serving_door({"a": url}, api_keys=("k" * 32,)) as door:
        for path in ("/v1/sessions", "/v1/models", "/v1/memory", "/v1/events", "/metrics"):
            assert httpx.get(f"{door.url}{path}").status_code == 401
            if path != "/v1/events":
                key = {"Authorization": f"Bearer {'k' * 32}"}
                assert httpx.get(f"{door.url}{path}", headers=key).status_code == 200
        assert httpx.get(f"{door.url}/ready").status_code == 200


def test_the_live_stream_is_that_of_all_and_goes_on_where_it_ended(client: httpx.Client, sessions: list[str]) -> None:
    seen: set[str] = set()
    with reading(client) as reader:
        while True:
            part = reader.next()
            seen |= ids(part)
            if not part[1]["has_more"]:
                break
        last_id = reader.last_id
    assert set(sessions) <= seen
    while (created := client.post("/v1/sessions", json={}).json()["id"])[4] == "a":
        sessions.append(created)
    sessions.append(created)
    with reading(client, last_id) as reader:
        told: list[tuple[str, Any]] = []
        while not told or told[-1][1]["session"]["id"] != created:
            told += reader.until("session", change="opened")
    assert "snapshot" not in [name for name, _ in told]


def test_an_id_of_other_replicas_is_none() -> None:
    ids = {"b": "00ff-1", "a": "12-34"}
    assert split_id(joined_id(ids), ["a", "b"]) == ids
    for names in (["a"], ["a", "b", "c"]):
        assert split_id(joined_id(ids), names) == {}
    assert split_id("a=12-34,b=x", ["a", "b"]) == {}
    assert split_id("", ["a"]) == {}
