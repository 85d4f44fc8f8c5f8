"""A session that has moved is followed once, and remembered."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from app.cluster.directory import name_key
from app.cluster.front.routing import moves
from app.cluster.table import Table
from tests.cluster.front.doors import Door, serving_door, serving_stub
from tests.cluster.pair import code
from tests.errors import error_response
from tests.waiting import wait_until

MOVED = "ses_a_" + "1" * 36
WANDERER = "ses_a_" + "2" * 36
OTHER = "ses_a_" + "3" * 36
LARGE = bytes(3 << 20)
NOWHERE = "http://127.0.0.1:9"
TURN = {"token_ids": [1, 2]}
CALL = {"model": "m", "prompt": "x"}


class Stub:
    """A replica that has handed on some sessions, and says of each request that it came."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.moved: dict[str, str] = {}
        """Where sessions have gone, as `Djinn-Home` names it."""
        self.lacks: set[str] = set()
        self.moving: dict[str, int] = {}
        """Sessions that are on their way, and how often it says so before it names where they are."""
        self.refuses: str | None = None
        """Why it takes nothing new."""
        self.is_busy = False
        """Whether it has no time to say what it has."""
        self.asked = 0
        self.may_move = threading.Event()
        """A move is done once that is set."""
        self.may_move.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await (await self._answer(request))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        session = (path.split("/") + [""] * 3)[3]
        if path == "/ready":
            return JSONResponse({"status": "ready"})
        if self.is_busy:
            return error_response(429, "tenant_limit")
        if request.query_params.get("name"):
            return JSONResponse({"data": []})
        if self.moving.get(session, 0) > 0:
            self.moving[session] -= 1
            return error_response(409, "moving", {"Djinn-Not-Done": "moving"})
        self.asked += 1
        if self.refuses is not None:
            return error_response(503, self.refuses, {"Djinn-Not-Done": self.refuses})
        if home := self.moved.get(session):
            return error_response(421, "moved", {"Djinn-Home": home})
        if session in self.lacks:
            return error_response(404, "not_found")
        if path.endswith("/move"):
            await asyncio.to_thread(self.may_move.wait)
        found = {"at": self.name, "method": request.method, "bytes": len(await request.body())}
        return JSONResponse({**found, "replica": "b"})


@dataclass(frozen=True)
class Stubs:
    a: Stub
    b: Stub
    urls: dict[str, str]
    door: Door

    @property
    def asked(self) -> tuple[int, int]:
        return self.a.asked, self.b.asked

    def get(self, session: str) -> httpx.Response:
        return httpx.get(f"{self.door.url}/v1/sessions/{session}")

    def turn(self, session: str) -> httpx.Response:
        return httpx.post(f"{self.door.url}/v1/sessions/{session}/generate", json=TURN)

    def call(self, name: str | None = None) -> httpx.Response:
        headers = {} if name is None else {"X-Session-ID": name}
        return httpx.post(f"{self.door.url}/v1/completions", json=CALL, headers=headers)

    @contextmanager
    def moving(self, threads: ThreadPoolExecutor) -> Iterator[Future[httpx.Response]]:
        """`OTHER` moves through the front door in a block."""
        self.a.may_move.clear()
        try:
            yield threads.submit(httpx.post, f"{self.door.url}/v1/sessions/{OTHER}/move", json={"replica": "b"})
        finally:
            self.a.may_move.set()


@pytest.fixture
def stubs() -> Iterator[Stubs]:
    a, b = Stub("a"), Stub("b")
    with serving_stub(a) as url_a, serving_stub(b) as url_b, serving_door({"a": url_a, "b": url_b}) as door:
        a.moved = {MOVED: f"b {url_b}", WANDERER: f"b {url_b}"}
        b.moved = {WANDERER: f"a {url_a}"}
        yield Stubs(a, b, {"a": url_a, "b": url_b}, door)


def test_a_moved_session_is_followed_and_then_found_at_once(stubs: Stubs) -> None:
    for _ in range(3):
        assert stubs.turn(MOVED).json() == {"at": "b", "method": "POST", "bytes": 19, "replica": "b"}
    assert stubs.asked == (1, 3)
    assert _ways(stubs.door, turn="yes") == {"followed": 1, "owner": 2}


def test_a_request_waits_for_a_session_that_is_on_its_way(stubs: Stubs) -> None:
    stubs.a.moving = {MOVED: 3}
    assert stubs.turn(MOVED).json()["at"] == "b"
    assert (stubs.a.moving, stubs.asked) == ({MOVED: 0}, (1, 1))


@pytest.mark.parametrize("why", ["draining", "stalled"])
def test_what_is_new_goes_elsewhere_if_a_replica_has_begun_to_drain_or_stall(stubs: Stubs, why: str) -> None:
    stubs.a.refuses = why
    assert [stubs.call(name).json()["at"] for name in (None, "mine", "mine", "yours")] == ["b"] * 4
    assert stubs.b.asked == 4
    stubs.b.refuses = why
    answer = stubs.call()
    assert code(answer) == (503, why)
    assert "Djinn-Not-Done" not in answer.headers


def test_a_session_that_moves_on_and_on_is_not_chased(stubs: Stubs) -> None:
    answer = stubs.get(WANDERER)
    assert (code(answer), answer.headers["Retry-After"]) == ((503, "moving_on"), "1")
    assert stubs.asked == (1, 1)
    assert _ways(stubs.door, turn="no") == {"moving_on": 1}


def test_a_session_that_has_moved_twice_is_away_with_the_replica_that_has_it(stubs: Stubs) -> None:
    """What the one before says of the next is old: the next one says itself that it has handed the session on."""
    stubs.b.moved = {MOVED: f"c {NOWHERE}"}
    with serving_door({**stubs.urls, "c": NOWHERE}) as door:
        for asked in range(1, 4):
            answer = httpx.post(f"{door.url}/v1/sessions/{MOVED}/generate", json=TURN)
            assert code(answer) == (503, "replica_away")
            assert _ways(door, turn="yes") == {"away": asked}


def test_a_large_body_is_not_kept_for_a_second_replica(stubs: Stubs) -> None:
    url = f"{stubs.door.url}/v1/sessions/{MOVED}/checkpoint/activation"
    assert httpx.put(url, content=LARGE).status_code in (200, 503)  # a replica may answer before the whole has come
    again = httpx.put(url, content=LARGE)
    assert (again.status_code, again.json()["bytes"]) == (200, len(LARGE))


def test_a_request_waits_for_a_session_that_moves(stubs: Stubs) -> None:
    with ThreadPoolExecutor() as threads:
        with stubs.moving(threads) as moving:
            wait_until(lambda: stubs.a.asked == 1)
            asking = threads.submit(stubs.turn, OTHER)
            wait_until(lambda: stubs.door.server.front.registry.get_sample_value("djinn_connections") == 2)
        assert moving.result().json()["at"] == "a"
        assert asking.result().json()["at"] == "b"
    assert stubs.asked == (1, 1)
    assert _ways(stubs.door, turn="yes") == {"owner": 1}


def test_a_request_does_not_wait_for_a_move_for_ever(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "PATIENCE_S", 0.0)
    with ThreadPoolExecutor() as threads, stubs.moving(threads):
        wait_until(lambda: stubs.a.asked == 1)
        assert stubs.get(OTHER).json()["at"] == "a"


def test_a_session_whose_next_home_has_left_is_found_by_asking_all(stubs: Stubs) -> None:
    stubs.a.moved = {MOVED: f"gone {NOWHERE}", OTHER: f"gone {NOWHERE}"}
    stubs.b.lacks = {OTHER}
    assert stubs.get(MOVED).json()["at"] == "b"
    assert stubs.get(OTHER).status_code == 421


def test_a_name_begins_anew_only_when_all_say_that_nobody_has_it(stubs: Stubs) -> None:
    table = Table(None)
    with serving_door(stubs.urls, table) as door:
        named = Stubs(stubs.a, stubs.b, stubs.urls, door)
        asyncio.run(table.put(name_key("", "mine"), "a"))
        stubs.a.moved = {"": f"gone {NOWHERE}"}
        stubs.b.is_busy = True
        assert code(named.call("mine")) == (503, "replica_away")
        stubs.b.is_busy = False
        wait_until(lambda: named.call("mine").status_code == 200)
        assert asyncio.run(table.find(name_key("", "mine"))) == "b"


def test_many_who_look_for_a_lost_session_cost_its_cluster_one_question() -> None:
    b = Stub("b")
    b.lacks = {OTHER}
    with serving_stub(b) as url_b, serving_door({"a": NOWHERE, "b": url_b}) as door:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: httpx.get(f"{door.url}/v1/sessions/{OTHER}"), range(8)))
        assert {each.status_code for each in answers} == {503}
        assert b.asked == 1


def test_a_move_through_the_front_door_is_known_when_the_home_is_away(tmp_path: Path) -> None:
    a, b = Stub("a"), Stub("b")
    with serving_stub(b) as url_b:
        with ExitStack() as life_of_a:
            urls = {"a": life_of_a.enter_context(serving_stub(a)), "b": url_b}
            first = Table(tmp_path)
            with serving_door(urls, first) as door:
                moved = httpx.post(f"{door.url}/v1/sessions/{OTHER}/move", json={"replica": "b"})
                assert moved.json()["replica"] == "b"
            first.close()
        # Another front door, from the same journal, and without the home.
        with serving_door(urls, Table(tmp_path)) as door:
            assert httpx.get(f"{door.url}/v1/sessions/{OTHER}").json()["at"] == "b"


def test_only_what_a_replica_had_waits_for_it(replica_urls: dict[str, str]) -> None:
    with ExitStack() as life:
        urls = {**replica_urls, "c": life.enter_context(serving_stub(Stub("c")))}
        with serving_door(urls) as door, httpx.Client(base_url=door.url, timeout=60) as http:
            lost = "ses_c_" + "5" * 36
            assert http.get(f"/v1/sessions/{lost}").json()["at"] == "c"
            session = ""
            while not session.startswith("ses_a_"):
                session = http.post("/v1/sessions", json={}).json()["id"]
            life.close()
            answer = http.get(f"/v1/sessions/{lost}")
            assert code(answer) == (503, "replica_away")
            assert int(answer.headers["Retry-After"]) > 0
            assert _ways(door, turn="no")["away"] == 1
            turn = {"token_ids": [1], "max_tokens": 1}
            assert http.post(f"/v1/sessions/{session}/generate", json=turn).status_code == 200
            assert _ways(door, turn="yes") == {"owner": 1}
            # What has no owner yet goes to those that are there.
            assert all(http.post("/v1/sessions", json={}).status_code == 201 for _ in range(3))
            # A list without some would be a wrong one.
            assert http.get("/v1/sessions").status_code == 503
            states = {"a": "ready", "b": "ready", "c": "away"}
            wait_until(lambda: {each.name: each.state.value for each in door.fleet} == states)
            assert http.get("/ready").json()["replicas"] == states


def _ways(door: Door, *, turn: str) -> dict[str, float]:
    """How requests came to their owners, as the front door has counted them."""
    every = [sample for family in door.server.front.registry.collect() for sample in family.samples]
    counted = [one for one in every if one.name == "djinn_front_requests_total" and one.labels["turn"] == turn]
    return {one.labels["way"]: one.value for one in counted if one.value}
