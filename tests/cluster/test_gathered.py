"""Lists and streams are those of all replicas, whichever is asked, and say so when one is missing."""

import json
import socket
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.cluster import gather
from app.domain.homes import home_of
from app.web.sse import disconnected
from tests.cluster.doors import Known, serving_door, serving_stub
from tests.cluster.pair import MODEL, Pair, behind, code, named, pair
from tests.durability.restarting import generate, open_session
from tests.errors import assert_error, error_response
from tests.events.streaming import ids, reading
from tests.waiting import wait_until

KEY = "k" * 32
ODD = {
    "/v1/events": b"event: snapshot\ndata: 7\n\n",
    "/v1/sessions": b'{"data": [{"id": "x", "used_at": null}], "has_more": false}',
}


@pytest.fixture(params=["a", "b"])
def client(servers: Pair, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """Of the cluster, by one of its servers."""
    with behind(servers, request.param) as http:
        yield http


@pytest.fixture
def sessions(client: httpx.Client, servers: Pair) -> Iterator[list[str]]:
    """Seven sessions at both replicas, in the order of their ids."""
    found = sorted(open_session(http) for http in (servers.a, servers.b, servers.a) * 2 + (servers.a,))
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


def test_models_and_memory_are_those_of_all(client: httpx.Client, servers: Pair) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [MODEL]
    version = {"anthropic-version": "2023-06-01"}
    listed = client.get("/v1/models?limit=9", headers=version)
    assert listed.headers["x-djinn-ignored"] == "limit"
    assert listed.json().keys() == servers.a.get("/v1/models", headers=version).json().keys()
    parts = [http.get("/v1/memory").json()["data"] for http in servers.clients.values()]
    whole = client.get("/v1/memory").json()["data"]
    assert whole["device"]["total_bytes"] == sum(part["device"]["total_bytes"] for part in parts)
    assert whole["block_tokens"] == parts[0]["block_tokens"]


@pytest.mark.parametrize(
    "path", ["/v1/sessions", "/v1/models", "/v1/memory", "/v1/activity", "/v1/findings", "/v1/vectors", "/v1/events"]
)
def test_a_list_says_who_is_missing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is away, or has no time, or answers what is no list, makes no list fail."""

    ports = list[int]()
    monkeypatch.setattr(gather, "PATIENCE_S", 2.0)

    async def mute(scope: Any, receive: Any, send: Any) -> None:
        await disconnected(receive)

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        ports.append(scope["client"][1])
        if path == "/v1/events":
            answer = Response(b'event: snapshot\ndata: {"sessions": [], "has_more": false}\n\n')
        elif path == "/v1/memory":
            answer = JSONResponse({"sessions": 1})
        else:
            answer = JSONResponse({"data": [], "minutes": [], "marks": [], "has_more": False, "capacity": None})
        await answer(scope, receive, send)

    known = Known({}, known=set("abcdef"))
    busy, damaged = serving_stub(error_response(503, "fenced")), serving_stub(Response(b"{"))
    odd = serving_stub(Response(ODD.get(path, b'{"data": [7]}')))
    with busy as b, damaged as c, odd as e, serving_stub(mute) as f, httpx.Client() as http:
        with serving_door({"b": b, "c": c, "e": e, "f": f}, known, inside) as door:
            answer = http.get(f"{door.url}{path}")
            lost = http.post(f"{door.url}/v1/vectors").json()["error"]["message"]
        own = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
        assert ports == [own], "its own part takes no connection, which it may refuse"
        assert (answer.status_code, answer.headers["Djinn-Missing"]) == (200, "a,b,c,e,f")
        assert path == "/v1/events" or answer.json()["missing"] == [*"abcef"]
    assert lost == "replica a, which gets each vector, dictionary, lens and probe as all do, is away: try again"


def test_who_may_not_ask_learns_nothing_and_costs_the_others_nothing(tmp_path: Any) -> None:
    """The key is checked before a body is taken: strangers cannot fill the memory for bodies."""
    key = {"X-Api-Key": KEY}
    with pair(tmp_path, start=False) as servers:
        servers.headers = key
        flags = ("--api-keys", KEY, "--max-bodies-bytes", "1MiB", "--cors-origins", "https://example.org")
        for name in ("a", "b"):
            servers.start(name, *flags)
        before = servers.a.get("/metrics").text
        url = servers.urls["b"]
        for path in ("/v1/sessions/ses_a_" + "0" * 36, "/v1/responses/resp_a_" + "0" * 32, "/v1/memory", "/v1/events"):
            assert httpx.get(f"{url}{path}").status_code == 401
        declared = {"Content-Length": str(1 << 20), "X-Session-ID": "name"}
        with ExitStack() as idle:
            for number in range(32):
                connection = idle.enter_context(socket.create_connection(("127.0.0.1", servers.ports["b"])))
                head = "".join(f"{name}: {value}\r\n" for name, value in {**declared, "Host": "localhost"}.items())
                connection.sendall(f"POST /v1/responses HTTP/1.1\r\n{head}\r\n{number}".encode())
            http = idle.enter_context(behind(servers))
            for page in [{"Origin": "https://example.org"}] * 4:  # at both
                answer = http.post("/v1/sessions", json={}, headers=page).raise_for_status()
                assert answer.headers.get_list("access-control-allow-origin") == [page["Origin"]]
        lost = 'djinn_cluster_requests_total{turn="no",way="away"}'
        assert [line for line in before.splitlines() if lost in line] == [f"{lost} 0.0"]


def test_the_live_stream_is_that_of_all_and_goes_on_where_it_ended(
    client: httpx.Client, sessions: list[str], servers: Pair
) -> None:
    seen, has_more = set[str](), True
    with reading(client) as reader:
        while has_more:
            part = reader.next()
            seen |= ids(part)
            has_more = part[1]["has_more"]
        last_id = reader.last_id
    assert set(sessions) <= seen
    created = open_session(servers.b)
    sessions.append(created)
    servers.moved(created, "b", "a")
    first = client.get(f"/v1/sessions/{created}/timeline").json()["data"][-1]
    assert first["kind"] == "arrived", "what was before stays at its former home"
    servers.b.delete(f"/v1/sessions/{(other := open_session(servers.b))}")
    with reading(client, last_id) as reader:
        told = reader.until("session", change="closed")
    assert told[-1][1]["session"]["id"] == other, "one that moves is not closed"
    assert created in [data["session"]["id"] for name, data in told if name == "session"]
    assert "snapshot" not in [name for name, _ in told]


def test_a_session_is_at_the_one_replica_that_its_id_names_and_the_past_is_that_of_all(
    client: httpx.Client, servers: Pair
) -> None:
    closed = [open_session(http) for http in servers.clients.values()]
    for session in closed:
        generate(client, session, [1], max_tokens=1)
        (home,) = servers.owners(session)
        tokens = servers.clients[home].get(f"/v1/sessions/{session}").json()["tokens"]
        assert (home, tokens) == (home_of(session), 2)
        client.delete(f"/v1/sessions/{session}").raise_for_status()
    days = [http.get("/v1/activity?step_s=86400").json() for http in (client, servers.a, servers.b)]
    all_turns, *turns = (sum(day["turns"] for day in told["minutes"]) for told in days)
    assert all_turns == sum(turns)
    assert {mark["replica"] for mark in days[0]["marks"]} == {"a", "b"}
    listed = client.get("/v1/sessions/closed?limit=2").json()["data"]
    assert [each["id"] for each in listed] == closed[::-1]


@pytest.mark.parametrize("session", ["ses_c_" + "0" * 36, "ses_" + "0" * 36, "nonsense", "%00", "ses_a_" + "0" * 36])
def test_a_session_that_nobody_has_is_not_found(client: httpx.Client, session: str) -> None:
    assert code(client.get(f"/v1/sessions/{session}")) == (404, "not_found")


def test_without_its_store_ids_and_names_of_sessions_still_find_their_owners() -> None:
    async def replica(scope: Any, receive: Any, send: Any) -> None:
        is_asked_for_own = scope["query_string"] == b"limit=1&name=own"
        await JSONResponse({"at": "a", "data": [{}] if is_asked_for_own else []})(scope, receive, send)

    with serving_stub(replica) as url, serving_door({"a": url}, Known({}, is_away=True)) as door:
        session, call = "ses_a_" + "0" * 36, f"{door.url}/v1/completions"
        for headers in ({"X-Session-ID": session}, {"x-session-token": session}, {"X-Session-ID": "own"}, {}):
            assert httpx.post(call, json={}, headers=headers).json()["at"] == "a"
        named = httpx.post(call, json={}, headers={"X-Session-ID": "a name"})
        assert code(named) == (503, "directory_away")
        assert int(named.headers["Retry-After"]) > 0


def test_a_vector_is_at_every_replica_or_at_none(client: httpx.Client, servers: Pair) -> None:
    """One that only some have can be deleted too."""
    width = client.get("/version").json()["hidden_size"]
    file = save({"vector": np.ones(width, np.float32)})

    def found() -> list[list[str]]:
        lists = [http.get("/v1/vectors").json()["data"] for http in servers.clients.values()]
        return [[each["name"] for each in data] for data in lists]

    for http in (client, servers.a, servers.b):
        http.post("/v1/vectors?name=calm", content=file).raise_for_status()
        assert http is not client or found() == [["calm"], ["calm"]]
        assert [each["name"] for each in client.get("/v1/vectors").json()["data"]] == ["calm"]
        assert client.delete("/v1/vectors/calm").status_code == 204
        assert found() == [[], []]
    assert_error(client.delete("/v1/vectors/calm"), 404, "not_found", param="vector")


def test_a_large_upload_comes_to_all_and_no_door_has_it_in_memory() -> None:
    came = list[int]()

    async def take(scope: Any, receive: Any, send: Any) -> None:
        came.append(sum([len(part) async for part in Request(scope, receive).stream()]))
        await Response()(scope, receive, send)

    with serving_stub(take) as a, serving_stub(take) as b, serving_door({"a": a, "b": b}, inside=take) as door:
        tracemalloc.start()
        httpx.post(f"{door.url}/v1/lenses", content=iter([bytes(1 << 20)] * 32 + [b"end"])).raise_for_status()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert came == [(32 << 20) + 3] * 3
    assert most < 16 << 20


@pytest.mark.parametrize("fails", [True, False])
def test_a_replica_that_cannot_answer_for_itself_asks_the_others_all_the_same(fails: bool) -> None:
    asked = list[str]()

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        assert not fails

    async def other(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["method"])
        await JSONResponse({"data": []})(scope, receive, send)

    with serving_stub(other) as url, serving_door({"a": url}, inside=broken) as door:
        assert code(httpx.delete(f"{door.url}/v1/vectors/calm")) == (502, "replica_lost")
        listed = httpx.get(f"{door.url}/v1/vectors")
        assert (listed.status_code, listed.json()["missing"]) == (200, ["d"])
    assert asked == ["DELETE", "GET"]


def test_a_session_that_is_asked_for_again_with_its_key_is_opened_once(client: httpx.Client, servers: Pair) -> None:
    with behind(servers, "a") as a, behind(servers, "b") as b:
        opened = {
            door.post("/v1/sessions", json={}, headers={"Idempotency-Key": f"key {number}"}).json()["id"]
            for door in (a, b, a)
            for number in range(8)
        }
    assert len(opened) == 8
    assert {home_of(each) for each in opened} == {"a", "b"}
    for session in opened:
        client.delete(f"/v1/sessions/{session}")


def test_files_and_batches_of_a_tenant_are_at_one_replica(client: httpx.Client, servers: Pair) -> None:
    call = {"model": MODEL, "prompt": "x"}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": call})
    form: dict[str, Any] = {"file": ("in.jsonl", line), "purpose": (None, "batch")}
    made = client.post("/v1/files", files=form).raise_for_status().json()["id"]
    batch = {"input_file_id": made, "endpoint": "/v1/completions", "completion_window": "24h"}
    begun = client.post("/v1/batches", json=batch).raise_for_status().json()["id"]
    for name in ("a", "b"):
        with behind(servers, name) as http:
            assert made in [each["id"] for each in http.get("/v1/files").json()["data"]]
            assert begun in [each["id"] for each in http.get("/v1/batches").json()["data"]]
            wait_until(lambda http=http: http.get(f"/v1/batches/{begun}").json()["status"] == "completed")  # type: ignore[misc]
            assert http.get(f"/v1/files/{made}/content").text == line
    client.delete(f"/v1/files/{made}").raise_for_status()


def test_a_name_that_many_call_at_once_at_both_has_one_session(servers: Pair) -> None:
    names = [f"at once {number}" for number in range(10)]
    call = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    with behind(servers, "a") as a, behind(servers, "b") as b, ThreadPoolExecutor(8) as threads:
        calls = [(http, name) for name in names for http in (a, b, a, b)]
        asked = threads.map(
            lambda each: each[0].post("/v1/completions", json=call, headers={"X-Session-ID": each[1]}), calls
        )
        assert {answer.status_code for answer in asked} <= {200, 409}, "a session does one turn after the other"
    for name in names:
        assert len(named(servers.a, name) + named(servers.b, name)) == 1
