"""A session that has moved is followed once, and remembered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from app.cluster.directory import name_key
from app.cluster.front.routing import moves
from app.cluster.table import Table
from tests.cluster.front.doors import Door, serving_door, serving_stub, wait_until

MOVED = "ses_a_" + "1" * 36
WANDERER = "ses_a_" + "2" * 36
LARGE = bytes(3 << 20)


def id_of(scope: Scope) -> str:
    """The session that the path names."""
    path: str = scope["path"]
    return (path.split("/") + [""] * 3)[3]


class Stub:
    """A replica that has handed on some sessions, and says of each request that it came."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.moved: dict[str, str] = {}
        """Where sessions have gone, as `Djinn-Home` names it."""
        self.lacks: set[str] = set()
        """Sessions that it says it has not."""
        self.moving: dict[str, int] = {}
        """Sessions that are on their way, and how often it says so before it names where they are."""
        self.drains = False
        self.is_busy = False
        """Whether it has no time to say what it has."""
        self.asked = 0
        self.lost = 0
        """How often it was asked for what it lacks."""
        self.may_move = threading.Event()
        """A move is done once that is set."""
        self.may_move.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope, receive)
        if scope["path"] == "/ready":
            answer: Response = JSONResponse({"status": "ready"})
        elif self.is_busy:
            answer = JSONResponse({"error": {"code": "tenant_limit"}}, 429)
        elif request.query_params.get("name"):
            answer = JSONResponse({"data": []})
        elif self.drains:
            self.asked += 1
            answer = JSONResponse({"error": {"code": "draining"}}, 503, {"Djinn-Not-Done": "draining"})
        elif self.moving.get(id_of(scope), 0) > 0:
            self.moving[id_of(scope)] -= 1
            answer = JSONResponse({"error": {"code": "moving"}}, 409, {"Djinn-Not-Done": "moving"})
        elif home := self.moved.get(id_of(scope)):
            self.asked += 1
            answer = JSONResponse({"error": {"code": "moved"}}, 421, {"Djinn-Home": home})
        elif id_of(scope) in self.lacks:
            self.lost += 1
            answer = JSONResponse({"error": {"code": "not_found"}}, 404)
        else:
            self.asked += 1
            if scope["path"].endswith("/move"):
                await asyncio.to_thread(self.may_move.wait)
            found = {"at": self.name, "method": request.method, "bytes": len(await request.body())}
            answer = JSONResponse({**found, "replica": "b"})
        await answer(scope, receive, send)


@pytest.fixture
def stubs() -> Iterator[tuple[Stub, Stub, dict[str, str]]]:
    a, b = Stub("a"), Stub("b")
    with serving_stub(a) as url_a, serving_stub(b) as url_b:
        a.moved = {MOVED: f"b {url_b}", WANDERER: f"b {url_b}"}
        b.moved = {WANDERER: f"a {url_a}"}
        yield a, b, {"a": url_a, "b": url_b}


def test_a_moved_session_is_followed_and_then_found_at_once(stubs: tuple[Stub, Stub, dict[str, str]]) -> None:
    a, b, urls = stubs
    with serving_door(urls) as door:
        for _ in range(3):
            answer = httpx.post(f"{door.url}/v1/sessions/{MOVED}/generate", json={"token_ids": [1, 2]})
            assert answer.json() == {"at": "b", "method": "POST", "bytes": 19, "replica": "b"}
        assert (a.asked, b.asked) == (1, 3)
        assert _ways(door, turn="yes") == {"followed": 1, "owner": 2}


def test_a_request_waits_for_a_session_that_is_on_its_way(stubs: tuple[Stub, Stub, dict[str, str]]) -> None:
    a, b, urls = stubs
    a.moving = {MOVED: 3}
    with serving_door(urls) as door:
        answer = httpx.post(f"{door.url}/v1/sessions/{MOVED}/generate", json={"token_ids": [1, 2]})
        assert answer.json() == {"at": "b", "method": "POST", "bytes": 19, "replica": "b"}
        assert (a.moving, a.asked, b.asked) == ({MOVED: 0}, 1, 1)


def test_what_is_new_goes_elsewhere_if_a_replica_has_begun_to_drain(stubs: tuple[Stub, Stub, dict[str, str]]) -> None:
    a, b, urls = stubs
    call = {"model": "m", "prompt": "x"}
    with serving_door(urls) as door:
        a.drains = True
        for name in (None, "mine", "mine", "yours"):
            headers = {} if name is None else {"X-Session-ID": name}
            assert httpx.post(f"{door.url}/v1/completions", json=call, headers=headers).json()["at"] == "b"
        assert b.asked == 4
        b.drains = True
        answer = httpx.post(f"{door.url}/v1/completions", json=call)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert "Djinn-Not-Done" not in answer.headers


def test_a_session_that_moves_on_and_on_is_not_chased(stubs: tuple[Stub, Stub, dict[str, str]]) -> None:
    a, b, urls = stubs
    with serving_door(urls) as door:
        answer = httpx.get(f"{door.url}/v1/sessions/{WANDERER}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "moving_on")
        assert answer.headers["Retry-After"] == "1"
        assert (a.asked, b.asked) == (1, 1)
        assert _ways(door, turn="no") == {"moving_on": 1}


def test_a_session_that_has_moved_twice_is_away_with_the_replica_that_has_it(
    stubs: tuple[Stub, Stub, dict[str, str]],
) -> None:
    """What the one before says of the next is old: the next one says itself that it has handed the session on."""
    _, b, urls = stubs
    away = "http://127.0.0.1:9"
    b.moved = {MOVED: f"c {away}"}
    with serving_door({**urls, "c": away}) as door:
        for asked in range(1, 4):
            answer = httpx.post(f"{door.url}/v1/sessions/{MOVED}/generate", json={"token_ids": [1, 2]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_away")
            assert _ways(door, turn="yes") == {"away": asked}


def test_a_large_body_is_not_kept_for_a_second_replica(stubs: tuple[Stub, Stub, dict[str, str]]) -> None:
    _, b, urls = stubs
    with serving_door(urls) as door:
        url = f"{door.url}/v1/sessions/{MOVED}/checkpoint/activation"
        answer = httpx.put(url, content=LARGE)
        assert answer.status_code in (200, 503)  # a replica may answer before the whole body has come
        again = httpx.put(url, content=LARGE)
        assert (again.status_code, again.json()["bytes"]) == (200, len(LARGE))
        assert b.asked >= 1


def test_a_request_waits_for_a_session_that_moves(stubs: tuple[Stub, Stub, dict[str, str]]) -> None:
    a, b, urls = stubs
    path = f"/v1/sessions/ses_a_{'6' * 36}"
    a.may_move.clear()
    with serving_door(urls) as door, ThreadPoolExecutor() as threads:
        try:
            moving = threads.submit(httpx.post, f"{door.url}{path}/move", json={"replica": "b"})
            wait_until(lambda: a.asked == 1)
            asking = threads.submit(httpx.post, f"{door.url}{path}/generate", json={"token_ids": [1]})
            wait_until(lambda: door.server.front.registry.get_sample_value("djinn_connections") == 2)
        finally:
            a.may_move.set()
        assert moving.result().json()["at"] == "a"
        assert asking.result().json()["at"] == "b"
        assert (a.asked, b.asked) == (1, 1)
        assert _ways(door, turn="yes") == {"owner": 1}


def test_a_request_does_not_wait_for_a_move_for_ever(
    stubs: tuple[Stub, Stub, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, urls = stubs
    monkeypatch.setattr(moves, "PATIENCE_S", 0.0)
    path = f"/v1/sessions/ses_a_{'7' * 36}"
    a.may_move.clear()
    with serving_door(urls) as door, ThreadPoolExecutor() as threads:
        try:
            moving = threads.submit(httpx.post, f"{door.url}{path}/move", json={"replica": "b"})
            wait_until(lambda: a.asked == 1)
            assert httpx.get(f"{door.url}{path}").json()["at"] == "a"
        finally:
            a.may_move.set()
        assert moving.result().status_code == 200


def test_calls_wait_for_no_move_of_a_session_without_an_id(stubs: tuple[Stub, Stub, dict[str, str]]) -> None:
    a, b, urls = stubs
    for each in (a, b):
        each.may_move.clear()
    with serving_door(urls) as door, ThreadPoolExecutor() as threads:
        try:
            moving = threads.submit(httpx.post, f"{door.url}/v1/sessions//move", json={"replica": "b"})
            wait_until(lambda: a.asked + b.asked == 1)
            call = {"model": "m", "prompt": "x"}
            answer = httpx.post(f"{door.url}/v1/completions", json=call, timeout=moves.PATIENCE_S / 2)
            assert answer.status_code == 200
        finally:
            for each in (a, b):
                each.may_move.set()
        moving.result()


def test_a_session_whose_next_home_has_left_is_found_by_asking_all(stubs: tuple[Stub, Stub, dict[str, str]]) -> None:
    a, b, urls = stubs
    a.moved = {MOVED: "gone http://127.0.0.1:9"}
    with serving_door(urls) as door:
        assert httpx.get(f"{door.url}/v1/sessions/{MOVED}").json()["at"] == "b"
        lost = "ses_a_" + "9" * 36
        a.moved = {lost: "gone http://127.0.0.1:9"}
        b.lacks = {lost}
        assert httpx.get(f"{door.url}/v1/sessions/{lost}").status_code == 421


def test_a_name_begins_anew_only_when_all_say_that_nobody_has_it(stubs: tuple[Stub, Stub, dict[str, str]]) -> None:
    a, b, urls = stubs
    call = {"model": "m", "prompt": "x"}
    table = Table(None)
    with serving_door(urls, table) as door:
        headers = {"X-Session-ID": "mine"}
        asyncio.run(table.put(name_key("", "mine"), "a"))
        a.moved = {"": "gone http://127.0.0.1:9"}
        b.is_busy = True
        answer = httpx.post(f"{door.url}/v1/completions", json=call, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_away")
        b.is_busy = False
        wait_until(lambda: httpx.post(f"{door.url}/v1/completions", json=call, headers=headers).status_code == 200)
        assert asyncio.run(table.find(name_key("", "mine"))) == "b"


def test_many_who_look_for_a_lost_session_cost_its_cluster_one_question() -> None:
    b, lost = Stub("b"), "ses_a_" + "8" * 36
    b.lacks = {lost}
    with serving_stub(b) as url_b, serving_door({"a": "http://127.0.0.1:9", "b": url_b}) as door:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: httpx.get(f"{door.url}/v1/sessions/{lost}"), range(8)))
        assert {each.status_code for each in answers} == {503}
        assert b.lost == 1


def test_a_move_through_the_front_door_is_known_when_the_home_is_away(tmp_path: Path) -> None:
    a, b = Stub("a"), Stub("b")
    session = "ses_a_" + "3" * 36
    with serving_stub(b) as url_b:
        with ExitStack() as life_of_a:
            urls = {"a": life_of_a.enter_context(serving_stub(a)), "b": url_b}
            first = Table(tmp_path)
            with serving_door(urls, first) as door:
                moved = httpx.post(f"{door.url}/v1/sessions/{session}/move", json={"replica": "b"})
                assert moved.json()["replica"] == "b"
            first.close()
        # Another front door, from the same journal, and without the home.
        with serving_door(urls, Table(tmp_path)) as door:
            assert httpx.get(f"{door.url}/v1/sessions/{session}").json()["at"] == "b"
            b.lacks = {lost := f"ses_a_{'4' * 36}"}
            answer = httpx.get(f"{door.url}/v1/sessions/{lost}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_away")


def test_only_what_a_replica_had_waits_for_it(replica_urls: dict[str, str]) -> None:
    a = Stub("c")
    with ExitStack() as life:
        urls = {**replica_urls, "c": life.enter_context(serving_stub(a))}
        with serving_door(urls) as door, httpx.Client(base_url=door.url, timeout=60) as http:
            lost = "ses_c_" + "5" * 36
            assert http.get(f"/v1/sessions/{lost}").json()["at"] == "c"
            session = _at(http, "a")
            life.close()
            answer = http.get(f"/v1/sessions/{lost}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_away")
            assert int(answer.headers["Retry-After"]) > 0
            assert _ways(door, turn="no")["away"] == 1
            turn = {"token_ids": [1], "max_tokens": 1}
            assert http.post(f"/v1/sessions/{session}/generate", json=turn).status_code == 200
            assert _ways(door, turn="yes") == {"owner": 1}
            # What has no owner yet goes to those that are there.
            assert all(http.post("/v1/sessions", json={}).status_code == 201 for _ in range(3))
            # A list without some would be a wrong one.
            assert http.get("/v1/sessions").status_code == 503
            wait_until(lambda: _states(door)["c"] == "away")
            assert http.get("/ready").json()["replicas"] == {"a": "ready", "b": "ready", "c": "away"}


def _at(http: httpx.Client, name: str) -> str:
    while True:
        session: str = http.post("/v1/sessions", json={}).json()["id"]
        if session.startswith(f"ses_{name}_"):
            return session


def _ways(door: Door, *, turn: str) -> dict[str, float]:
    """How requests came to their owners, as the front door has counted them."""
    every = [sample for family in door.server.front.registry.collect() for sample in family.samples]
    counted = [one for one in every if one.name == "djinn_front_requests_total" and one.labels["turn"] == turn]
    return {one.labels["way"]: one.value for one in counted if one.value}


def _states(door: Door) -> dict[str, str]:
    return {each.name: each.state.value for each in door.fleet}
