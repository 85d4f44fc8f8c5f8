"""The front door finds the owner of each session, notices replicas that are away, and answers for the whole cluster."""

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.cluster.fleet import State
from app.cluster.front import look
from app.cluster.front.merged.event_ids import joined_id, split_id
from app.cluster.front.merged.merging import merged_memory, merged_page
from app.domain.homes import home_of
from tests.cluster.front.doors import AwayDirectory, Door, serving_door, serving_stub
from tests.cluster.pair import code, free_port
from tests.durability.restarting import generate, open_session
from tests.errors import assert_error, error_response
from tests.events.streaming import ids, reading
from tests.serving import serve
from tests.waiting import PATIENCE_S, wait_until

KEY = "k" * 32


@pytest.fixture
def sessions(client: httpx.Client) -> Iterator[list[str]]:
    """Seven sessions at both replicas, in the order of their ids."""
    found = sorted(client.post("/v1/sessions", json={}).json()["id"] for _ in range(7))
    yield found
    for session in found:
        client.delete(f"/v1/sessions/{session}")


def test_the_list_has_every_session_once_and_in_order(client: httpx.Client, sessions: list[str]) -> None:
    listed, has_more = list[str](), True
    while has_more:
        page = client.get("/v1/sessions", params={"limit": 2, "after": listed[-1:]}).json()
        listed += [session["id"] for session in page["data"]]
        has_more = page["has_more"]
        assert len(page["data"]) == 2 or not has_more
    assert listed == sorted(set(listed))
    assert [session for session in listed if session in sessions] == sessions


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
    listed = client.get("/v1/models?limit=9", headers={"anthropic-version": "2023-06-01"})
    assert listed.headers["x-djinn-ignored"] == "limit"
    alone = httpx.get(f"{next(iter(replica_urls.values()))}/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert listed.json().keys() == alone.json().keys()
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
        {"moves": {"out": moved}, "counts": None, "tenants": {"x": {"sessions": 1}}},
        {"moves": {"out": never, "in": never}, "counts": None, "tenants": {"y": {"sessions": 2}}},
    ]
    tenants = {"x": {"sessions": 1}, "y": {"sessions": 2}}
    assert merged_memory(views) == {"moves": {"out": moved, "in": never}, "counts": None, "tenants": tenants}


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
    seen, has_more = set[str](), True
    with reading(client) as reader:
        while has_more:
            part = reader.next()
            seen |= ids(part)
            has_more = part[1]["has_more"]
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


MODEL = "tiny-llama"


def test_each_session_is_at_the_one_replica_that_its_id_names(
    client: httpx.Client, sessions: list[str], replica_urls: dict[str, str]
) -> None:
    assert {home_of(session) for session in sessions} == {"a", "b"}  # new ones go where there is room
    for session in sessions:
        generate(client, session, [7, 8], max_tokens=1)
        views = {name: httpx.get(f"{url}/v1/sessions/{session}") for name, url in replica_urls.items()}
        assert [name for name, view in views.items() if view.status_code == 200] == [home_of(session)]
        assert views[str(home_of(session))].json()["tokens"] == 3


@pytest.mark.parametrize("session", ["ses_c_" + "0" * 36, "ses_" + "0" * 36, "nonsense", "%00", "ses_a_" + "0" * 36])
def test_a_session_that_nobody_has_is_not_found(client: httpx.Client, session: str) -> None:
    assert code(client.get(f"/v1/sessions/{session}")) == (404, "not_found")


def test_without_its_directory_ids_still_name_their_owners(replica_urls: dict[str, str]) -> None:
    with serving_door(replica_urls, AwayDirectory()) as door, httpx.Client(base_url=door.url, timeout=60) as http:
        session = open_session(http)
        generate(http, session, [1], max_tokens=1)
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
        assert http.post("/v1/completions", json=body, headers={"X-Session-ID": session}).status_code == 200
        by_token = [http.post("/v1/completions", json=body, headers={"x-session-token": session}) for _ in range(3)]
        assert {answer.headers["x-session-token"] for answer in by_token} == {session}
        assert http.post("/v1/completions", json=body).status_code == 200
        named = http.post("/v1/completions", json=body, headers={"X-Session-ID": "a name"})
        assert code(named) == (503, "directory_away")
        assert int(named.headers["Retry-After"]) > 0


def test_what_servers_say_among_each_other_is_not_for_clients(client: httpx.Client) -> None:
    for path in ("/v1/cluster", "/v1/cluster/sessions", "/v1/%63luster/sessions"):
        assert "only servers" in assert_error(client.post(path, content=b"x"), 404, "not_found")


def test_a_vector_is_at_every_replica_or_at_none(client: httpx.Client, replica_urls: dict[str, str]) -> None:
    """One that only some have can be deleted too."""
    width = client.get("/version").json()["hidden_size"]
    file = save({"vector": np.ones(width, np.float32)})

    def found() -> list[list[str]]:
        lists = [httpx.get(f"{url}/v1/vectors").json()["data"] for url in replica_urls.values()]
        return [[each["name"] for each in data] for data in lists]

    for url in (door_url := str(client.base_url), *replica_urls.values()):
        httpx.post(f"{url}/v1/vectors?name=calm", content=file).raise_for_status()
        assert url != door_url or found() == [["calm"], ["calm"]]
        assert client.delete("/v1/vectors/calm").status_code == 204
        assert found() == [[], []]
    assert_error(client.delete("/v1/vectors/calm"), 404, "not_found", param="vector")


def test_a_vector_that_one_replica_may_still_have_is_not_said_to_be_gone() -> None:
    async def delete(request: Request) -> Response:
        return (
            error_response(503, "not_durable") if request.scope["server"][1] == refusing else Response(status_code=204)
        )

    stub = Starlette(
        routes=[
            Route("/ready", lambda request: Response()),
            Route("/v1/vectors/{name}", delete, methods=["DELETE"]),
        ]
    )
    with serving_stub(stub) as a, serving_stub(stub) as b, serving_door({"a": a, "b": b}) as door:
        for url in (a, b):
            refusing = httpx.URL(url).port
            assert code(httpx.delete(f"{door.url}/v1/vectors/calm")) == (503, "not_durable")


READY = Starlette(routes=[Route("/ready", lambda request: Response())])


def test_a_replica_that_is_back_does_not_wait_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "PATIENCE_S", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = {"a": f"http://127.0.0.1:{free_port()}", "b": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with serving_door({"a": urls["a"]}) as door:
            door.fleet.replace(urls)
            wait_until(lambda: select.select([silent], [], [], 0)[0] != [])
            replica = door.fleet.find("a")
            assert replica is not None
            with serving_stub(READY, replica.port):
                wait_until(lambda: replica.state is State.READY)


def test_a_session_that_is_asked_for_again_with_its_key_is_opened_once(client: httpx.Client) -> None:
    opened = {
        client.post("/v1/sessions", json={}, headers={"Idempotency-Key": str(key)}).json()["id"]
        for _ in range(3)
        for key in range(4)
    }
    assert len(opened) == 4
    assert {home_of(each) for each in opened} == {"a", "b"}, "they go where there is room"
    for session in opened:
        client.delete(f"/v1/sessions/{session}")


def test_strangers_cost_the_replicas_nothing_and_learn_only_whether_work_is_taken() -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    with counting_stub() as (stub, asked), serving_door({"a": stub}, api_keys=(KEY,)) as door:
        for number in range(20):
            for path in (
                f"/v1/sessions/ses_b_{number:036d}",
                f"/v1/responses/resp_b_{number:036d}",
                "/v1/memory",
                "/no",
            ):
                assert httpx.get(f"{door.url}{path}").status_code == 401
            named = {"X-Session-ID": f"name {number}"}
            assert httpx.post(f"{door.url}/v1/chat/completions", headers=named, json={}).status_code == 401
        assert asked == []
        assert httpx.get(f"{door.url}/v1/memory", headers=key).status_code == 404
        assert asked == ["/v1/memory"]
        assert httpx.get(f"{door.url}/ready").json() == {"status": "ready"}
        assert httpx.get(f"{door.url}/ready", headers=key).json() == {"status": "ready", "replicas": {"a": "ready"}}


def test_a_page_of_another_site_may_ask_with_a_key_and_learns_why_it_may_not() -> None:
    page = {"Origin": "https://example.org"}
    preflight = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    settings: dict[str, Any] = {"api_keys": (KEY,), "cors_origins": ("https://example.org",)}
    with serve(replica="a", **settings) as url, serving_door({"a": url}, **settings) as door:
        assert httpx.options(f"{door.url}/v1/sessions", headers=preflight).status_code == 200
        refused = httpx.post(f"{door.url}/v1/sessions", headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page["Origin"])
        answer = httpx.post(f"{door.url}/v1/sessions", headers={**page, "Authorization": f"Bearer {KEY}"})
        assert answer.status_code == 201
        assert answer.headers.get_list("access-control-allow-origin") == [page["Origin"]]


@contextmanager
def counting_stub() -> Iterator[tuple[str, list[str]]]:
    """A replica that has nothing, and the paths that it is asked for beside looks."""
    asked: list[str] = []

    def answer(request: Request) -> Response:
        asked.append(request.url.path)
        return Response(status_code=404)

    app = Starlette(routes=[*READY.routes, Route("/{path:path}", answer, methods=["GET", "POST"])])
    with serving_stub(app) as url:
        yield url, asked
