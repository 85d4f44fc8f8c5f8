"""A session that has moved is followed once, and remembered."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from app.cluster import hop
from app.cluster.key import ClusterKey
from app.cluster.membership import name_key
from tests.cluster.doors import Door, Known, serving_door, serving_stub
from tests.cluster.pair import KEY, code
from tests.errors import error_response
from tests.waiting import PATIENCE_S, until, wait_until

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
        self.busy: Response | None = None
        """What it answers as long as it cannot say what it has."""
        self.asked = 0
        self.hangs = self.is_deaf = False
        """Whether turns have no end, and whether nothing else is answered either."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            self.asked += 1
            if home := self.moved.get(dict(scope["headers"])[b"x-session-id"].decode()):
                await error_response(421, "moved", {"Djinn-Home": home})(scope, receive, send)
                return
            await send({"type": "websocket.accept"})
            await receive()
            return
        await (await self._answer(Request(scope, receive)))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        session = (path.split("/") + [""] * 3)[3]
        if path == "/health":
            await until(lambda: not self.is_deaf)
            return JSONResponse({"status": "ok"})
        if self.busy is not None:
            return self.busy
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
        if path.endswith("/generate"):
            await until(lambda: not self.hangs)
        return JSONResponse({"at": self.name, "method": request.method, "bytes": len(await request.body())})


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

    def connect(self, session: str) -> ClientConnection:
        url = f"{self.door.url.replace('http', 'ws')}/v1/responses"
        return connect(url, additional_headers={"X-Session-ID": session})

    def listen(self, session: str) -> tuple[int, str]:
        """Wait for a message that does not come. Returns the code of the close and its reason."""
        with self.connect(session) as connection, pytest.raises(ConnectionClosed) as closed:
            connection.recv()
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code, closed.value.rcvd.reason

    def call(self, name: str | None = None) -> httpx.Response:
        headers = {} if name is None else {"X-Session-ID": name}
        return httpx.post(f"{self.door.url}/v1/completions", json=CALL, headers=headers)


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubs]:
    monkeypatch.setattr(hop, "LOOK_PATIENCE_S", hop.LOOK_PATIENCE_S / 5)
    a, b = Stub("a"), Stub("b")
    with serving_stub(a) as url_a, serving_stub(b) as url_b, serving_door({"a": url_a, "b": url_b}) as door:
        a.moved = {MOVED: f"b {url_b}", WANDERER: f"b {url_b}"}
        b.moved = {WANDERER: f"a {url_a}"}
        yield Stubs(a, b, {"a": url_a, "b": url_b}, door)


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
    refusal = error_response(503, why, {"Djinn-Not-Done": why})
    for others in (stubs.urls, {"a": NOWHERE}, {}):
        with serving_door(others, inside=refusal) as door:
            assert code(httpx.post(f"{door.url}/v1/completions", json=CALL)) == (503, why)


def test_what_is_asked_for_again_is_where_it_was_done_though_the_first_choice_took_nothing(stubs: Stubs) -> None:
    with serving_stub(Stub("c")) as url, serving_door({**stubs.urls, "c": url}) as door:

        def places() -> list[str]:
            url, keys = f"{door.url}/v1/completions", map(str, range(16))
            return [httpx.post(url, json=CALL, headers={"Idempotency-Key": key}).json()["at"] for key in keys]

        stubs.a.refuses = "draining"
        done = places()
        assert set(done) == {"b", "c"}
        door.known.members.pop("a")
        assert places() == done


def test_a_call_is_answered_soon_however_many_replicas_have_vanished() -> None:
    with ExitStack() as ends:
        urls = {name: ends.enter_context(_vanished()) for name in "abce"}
        door = ends.enter_context(serving_door(urls, inside=JSONResponse({"at": "d"})))
        assert httpx.post(f"{door.url}/v1/completions", json=CALL, timeout=PATIENCE_S).json()["at"] == "d"


@contextmanager
def _vanished() -> Iterator[str]:
    """The URL of a replica whose packets are lost: nothing answers, not even to a connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        yield f"http://127.0.0.1:{full.getsockname()[1]}"


def test_a_session_that_moves_on_and_on_is_not_chased(stubs: Stubs) -> None:
    answer = stubs.get(WANDERER)
    assert (code(answer), answer.headers["Retry-After"]) == ((503, "moving_on"), "1")
    assert stubs.asked == (1, 1)
    assert stubs.door.ways(turn="no") == {"moving_on": 1}


def test_a_session_that_has_moved_twice_is_away_with_the_replica_that_has_it(stubs: Stubs) -> None:
    """What the one before says of the next is old: the next one says itself that it has handed the session on."""
    stubs.b.moved = {MOVED: f"c {NOWHERE}"}
    with serving_door({**stubs.urls, "c": NOWHERE}) as door:
        for asked in range(1, 4):
            answer = httpx.post(f"{door.url}/v1/sessions/{MOVED}/generate", json=TURN)
            assert code(answer) == (503, "replica_away")
            assert door.ways(turn="yes") == {"away": asked}


def test_a_handshake_follows_a_session_and_is_refused_while_its_replica_is_shunned(stubs: Stubs) -> None:
    with stubs.connect(MOVED):
        assert stubs.asked == (1, 1)
    stubs.door.fleet.reachable("a").shun(PATIENCE_S)
    stubs.b.lacks = {OTHER}
    with pytest.raises(InvalidStatus) as refused:
        stubs.connect(OTHER)
    assert (refused.value.response.status_code, stubs.a.asked) == (503, 1)
    assert b"replica_away" in refused.value.response.body


def test_a_large_body_is_not_kept_for_a_second_replica(stubs: Stubs) -> None:
    url = f"{stubs.door.url}/v1/sessions/{MOVED}/checkpoint/activation"
    assert httpx.put(url, content=LARGE).status_code in (200, 503)  # a replica may answer before the whole has come
    again = httpx.put(url, content=LARGE)
    assert (again.status_code, again.json()["bytes"]) == (200, len(LARGE))


def test_a_session_whose_next_home_has_left_is_found_by_asking_all(stubs: Stubs) -> None:
    stubs.a.moved = {MOVED: f"gone {NOWHERE}", OTHER: f"gone {NOWHERE}"}
    stubs.b.lacks = {OTHER}
    assert stubs.get(MOVED).json()["at"] == "b"
    assert stubs.get(OTHER).status_code == 421


def test_a_session_is_not_lost_where_the_name_of_its_former_home_is_another_servers(stubs: Stubs) -> None:
    stubs.b.lacks = {MOVED}
    known = Known({}, renewed={"b"})
    with serving_stub(Stub("c")) as url, serving_door({**stubs.urls, "c": url}, known) as door:
        assert httpx.get(f"{door.url}/v1/sessions/{MOVED}").json()["at"] == "c"


def test_a_name_begins_anew_only_when_all_say_that_nobody_has_it(stubs: Stubs) -> None:
    known = Known({}, {name_key(None, name): "a" for name in ("mine", "yours")})
    with serving_door(stubs.urls, known) as door:
        named = Stubs(stubs.a, stubs.b, stubs.urls, door)
        stubs.a.moved = {"": f"gone {NOWHERE}"}
        for name, busy in (("mine", error_response(429, "tenant_limit")), ("yours", Response(b"{"))):
            stubs.b.busy = busy
            assert code(named.call(name)) == (503, "replica_away")
        stubs.b.busy = None
        wait_until(lambda: named.call("mine").status_code == 200)
        assert known.places[name_key(None, "mine")] == "b"


def test_what_came_over_a_hop_is_not_sent_on(stubs: Stubs) -> None:
    """Only a replica can say so: the header proves that."""
    session = f"{stubs.door.url}/v1/sessions/{OTHER}"
    proof = ClusterKey(KEY.encode()).sign(b"hop", b"a", b"d")
    assert httpx.get(session, headers={"Djinn-Hop": f"a {proof}"}).status_code == 404
    for forged in ("a", f"b {proof}", "a " + "0" * 64, ""):
        assert code(httpx.get(session, headers={"Djinn-Hop": forged})) == (502, "peer_stranger")


@pytest.mark.parametrize("sign", ["its lease has run out", "it does not answer looks"])
@pytest.mark.parametrize("what", ["turn", "WebSocket"])
def test_what_is_under_way_is_cut_when_its_replica_is_lost(stubs: Stubs, sign: str, what: str) -> None:
    stubs.a.hangs, stubs.b.lacks = True, {OTHER}
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(stubs.turn if what == "turn" else stubs.listen, OTHER)
        wait_until(lambda: stubs.asked == (1, 0))
        if sign == "its lease has run out":
            stubs.door.known.members.pop("a")
        else:
            stubs.a.is_deaf = True
        found = asking.result(PATIENCE_S)
    if isinstance(found, httpx.Response):
        assert code(found) == (502, "replica_lost")
        assert stubs.door.ways(turn="yes") == {"lost": 1}
    else:
        assert found == (1013, "the replica went away"), "try again later (RFC 6455, 11.7)"
    assert code(stubs.turn(OTHER)) == (503, "replica_away")
    stubs.a.hangs = False
    if stubs.a.is_deaf:
        stubs.a.is_deaf = False
        wait_until(lambda: stubs.turn(OTHER).status_code == 200)
