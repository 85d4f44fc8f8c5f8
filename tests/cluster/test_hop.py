"""What a replica sends on passes whole, as it comes, and ends where either side ends it."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.cluster.doors import Door, Known, serving_door, serving_stub
from tests.cluster.pair import MODEL, Pair, behind, code, named
from tests.durability.restarting import open_session
from tests.waiting import PATIENCE_S, wait_until
from tests.web.connections.test_websockets import HANDSHAKE

SESSION = "ses_a_" + "0" * 36
MIB = 1 << 20


class Stub:
    """A replica that does as the path of a request says."""

    def __init__(self) -> None:
        self.sent = 0
        """Bytes of endless answers."""
        self.disconnects = 0
        self.seen: list[dict[str, str]] = []
        """Headers of requests."""
        self.ports: list[int] = []
        """From which they came."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if scope["path"] == "/health":
            await Response(b"{}")(scope, receive, send)
            return
        self.seen.append(dict(request.headers))
        self.ports.append(scope["client"][1])
        match scope["path"].rpartition("/")[2]:
            case "echo":
                answer: Response = StreamingResponse(_parts(await request.body()))
            case "headers":
                answer = Response(b"x", headers={"Keep-Alive": "timeout=5", "X-Own": "kept"})
            case "endless":
                answer = StreamingResponse(self._endless())
            case "silent":
                await self._silent(receive)
                return
            case "cut":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"begun", "more_body": True})
                raise RuntimeError("the stub ends in the middle")
            case "refuse":
                answer = Response(b"no", 413)
            case _:
                answer = Response(b"fine")
        await answer(scope, receive, send)

    async def _endless(self) -> AsyncIterator[bytes]:
        try:
            while True:
                self.sent += MIB
                yield bytes(MIB)
                await asyncio.sleep(0)
        finally:
            self.disconnects += 1

    async def _silent(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnects += 1


async def _parts(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), 100_000):
        yield content[start : start + 100_000]
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def stub() -> Stub:
    return Stub()


@pytest.fixture(scope="module")
def stub_door(stub: Stub) -> Iterator[Door]:
    with serving_stub(stub) as url, serving_door({"a": url}) as door:
        yield door


def _url(door: Door, what: str) -> str:
    return f"{door.url}/v1/sessions/{SESSION}/{what}"


@pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_001])
def test_bodies_pass_whole_both_ways(stub_door: Door, size: int) -> None:
    content = bytes(i * 7 % 251 for i in range(min(size, 5000))) * (size // min(size, 5000) if size else 0)
    with httpx.Client() as http:
        for _ in range(2):  # the second time on the same connections
            assert http.post(_url(stub_door, "echo"), content=content).content == content
        assert http.post(_url(stub_door, "echo"), content=iter([content, b"end"])).content == content + b"end"


def test_a_connection_serves_one_request_after_the_other(stub_door: Door, stub: Stub) -> None:
    """If the client has not asked again before the door has taken the connection back."""

    def all_on_one() -> bool:
        for what in ("fine", "echo", "refuse", "fine"):
            httpx.post(_url(stub_door, what), content=b"hello")
        return len(set(stub.ports[-4:])) == 1

    wait_until(all_on_one)


def test_an_old_client_gets_an_answer_without_chunks(stub_door: Door) -> None:
    with socket.create_connection(stub_door.address, PATIENCE_S) as connection:
        path = f"/v1/sessions/{SESSION}/echo".encode()
        connection.sendall(b"POST " + path + b" HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello")
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert (b"chunked" in head.lower(), body) == (False, b"hello")


def test_headers_of_one_connection_do_not_pass(stub_door: Door, stub: Stub) -> None:
    given = {"Connection": "keep-alive, X-Mine", "X-Mine": "of this connection", "X-Kept": "kept", "TE": "trailers"}
    given |= {"X-Forwarded-For": "192.0.2.1", "X-Request-Id": "my-request"}
    answer = httpx.get(_url(stub_door, "headers"), headers=given)
    assert answer.headers["X-Own"] == "kept"
    assert answer.headers["X-Request-Id"] == "my-request"
    assert "Keep-Alive" not in answer.headers
    assert len(answer.headers.get_list("date")) == 1
    seen = stub.seen[-1]
    assert {"x-mine", "te"}.isdisjoint(seen)
    assert seen["djinn-hop"].startswith("d ")
    assert (seen["x-kept"], seen["x-request-id"]) == ("kept", "my-request")
    assert seen["x-forwarded-for"] == "192.0.2.1"


def test_a_replica_waits_for_a_slow_reader(stub_door: Door, stub: Stub) -> None:
    stub.sent, before = 0, stub.disconnects
    with socket.socket() as connection:
        connection.settimeout(PATIENCE_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(stub_door.address)
        connection.sendall(f"GET /v1/sessions/{SESSION}/endless HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        connection.recv(100)
        last = -1
        while stub.sent != last:  # until nothing more passes
            last = stub.sent
            threading.Event().wait(0.5)
        assert stub.sent <= 32 * MIB  # what the kernel's buffers hold, not all that memory has
        while stub.sent == last:
            assert connection.recv(MIB)
    wait_until(lambda: stub.disconnects > before)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_client_that_goes_away_is_gone_at_the_replica(stub_door: Door, stub: Stub, method: str) -> None:
    before, seen = stub.disconnects, len(stub.seen)
    with socket.create_connection(stub_door.address, PATIENCE_S) as connection:
        path = f"/v1/sessions/{SESSION}/silent"
        connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        wait_until(lambda: len(stub.seen) > seen)
    wait_until(lambda: stub.disconnects == before + 1)


def test_an_answer_that_ends_in_the_middle_is_not_taken_for_a_whole_one(stub_door: Door) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(_url(stub_door, "cut"))
    assert httpx.get(_url(stub_door, "fine")).text == "fine"


async def test_an_answer_that_is_not_http_is_named_with_its_replica() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"220 mail\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        with serving_door({"a": f"http://{host}:{port}"}) as door:
            answer = await asyncio.to_thread(httpx.get, _url(door, "fine"))
    assert code(answer) == (502, "replica_lost")
    assert "replica a has answered what is not HTTP;" in answer.text


def test_a_body_that_cannot_be_read_is_refused_alike_at_each_server(servers: Pair) -> None:
    path, packed = f"/v1/sessions/{open_session(servers.a)}/generate", {"Content-Encoding": "gzip"}
    with behind(servers) as b:
        for headers in (packed, {**packed, "Idempotency-Key": "x"}):
            answers = [http.post(path, content=b"not packed", headers=headers) for http in (servers.a, b)]
            assert [code(each) for each in answers] == [(400, "malformed_request")] * 2
            assert answers[0].content == answers[1].content


@pytest.mark.parametrize("at", ["a", "b"])
def test_a_client_that_closes_ends_its_response(servers: Pair, at: str) -> None:
    url = servers.urls[at].replace("http", "ws") + "/v1/responses"
    for name in ("one", "zwölf", "\u4e09"):  # at both servers
        with connect(url, additional_headers={"X-Session-ID": f"{at} {name}"}) as connection:
            connection.send(f'{{"type": "response.create", "model": "{MODEL}", "input": "hi", "ignore_eos": true}}')
            assert "response.created" in str(connection.recv())
    for http in servers.clients.values():
        wait_until(lambda http=http: http.get("/v1/memory").json()["turns_running"] == 0)  # type: ignore[misc]
    assert len(named(servers.a, f"{at} zwölf") + named(servers.b, f"{at} zwölf")) == 1


@pytest.mark.parametrize("name", ["x", "y", "z", None])
def test_what_is_no_event_is_refused_where_it_is_for(servers: Pair, name: str | None) -> None:
    named = {} if name is None else {"X-Session-ID": name}
    with connect(servers.urls["b"].replace("http", "ws") + "/v1/responses", additional_headers=named) as connection:
        connection.ping()
        connection.send([b"{", b'"x": "' + b"y" * 70_000, b'"}'])  # in fragments
        assert '"error"' in str(connection.recv())


def test_a_handshake_that_is_refused_gets_the_answer(servers: Pair) -> None:
    url = servers.urls["b"].replace("http", "ws") + "/v1/responses"
    with pytest.raises(InvalidStatus) as refused, connect(url, additional_headers={"X-Session-ID": "x" * 257}):
        pass
    assert refused.value.response.status_code == 400


def test_a_name_waits_for_the_store_and_a_message_passes_on_the_way_to_a_replica() -> None:
    received: list[str] = []

    async def replica(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            received.append(message["text"])
            await send({"type": "websocket.send", "text": message["text"].upper()})
            if message["text"] == "end":
                await send({"type": "websocket.close", "code": 4001, "reason": "\u202e" + "ä" * 60})

    with serving_stub(replica) as url, serving_door({"a": url}) as door:
        socket_url = door.url.replace("http", "ws") + "/v1/responses"
        with connect(socket_url, additional_headers={"X-Session-ID": SESSION}) as connection:
            for text in ("one", "x" * 200_000, "end"):
                connection.send(text)
                assert connection.recv() == text.upper()
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4001, r"\u202e" + "ä" * 58), "at most 123 bytes"
        assert len(received) == 3
        with socket.create_connection(door.address, PATIENCE_S) as raw:
            head = HANDSHAKE.replace(b"localhost", b"x:y").replace(b"/responses", b"/responses?a#b")
            raw.sendall(head[:-2] + f"X-Session-ID: {SESSION}\r\n\r\n".encode())
            assert raw.recv(12) == b"HTTP/1.1 101", "whatever the client calls the server"
        with connect(socket_url, additional_headers={"X-Session-ID": SESSION}) as connection:
            door.known.members.pop("a")
            with pytest.raises(ConnectionClosed) as cut:
                connection.recv(timeout=10)
        assert cut.value.rcvd is not None
        assert cut.value.rcvd.code == 1013
    with serving_door({}, Known({}, is_away=True)) as blind:
        url = blind.url.replace("http", "ws") + "/v1/responses"
        with pytest.raises(InvalidStatus) as away, connect(url, additional_headers={"X-Session-ID": "a name"}):
            pass
    assert away.value.response.status_code == 503
