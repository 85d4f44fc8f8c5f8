"""When the other side is not a healthy Djinn. Each case for both clients, whose transports are written twice."""

import asyncio
import json
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import app.domain.errors
import client
from client import edge, errors
from client.calls import TurnOptions
from client.edge import Connection
from client.transport import AsyncTransport, Transport
from tests.client.conftest import NOBODY, SESSION, AnswerWith

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Request-Id: req_1\r\nConnection: close\r\n\r\n"
TOKEN = b'event: token\ndata: {"text": "a", "token_ids": [1]}\n\n'
BUSY = (
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nConnection: close\r\n\r\n"
    b'{"error": {"message": "the queue is full", "type": "rate_limit_error", "code": "queue_full", "param": null}}'
)
PROXY_PAGE = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 15\r\n\r\n<h1>no luck</h1>"
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 5\r\n\r\nhello"
BROKEN_OFF = STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked") + b"100\r\n" + TOKEN
Ask = Callable[..., object]


def health(url: str, timeout: float = 30) -> object:
    with client.Djinn(url, timeout=timeout, max_retries=0) as djinn:
        return djinn.health()


def health_async(url: str, timeout: float = 30) -> object:
    async def ask() -> object:
        async with client.AsyncDjinn(url, timeout=timeout, max_retries=0) as djinn:
            return await djinn.health()

    return asyncio.run(ask())


def stream(url: str, timeout: float = 30) -> object:
    """Read a turn's events from whatever the server answers."""
    with (
        closing(Transport(Connection(url, None, timeout=timeout))) as transport,
        client.Session(transport, SESSION).stream(prompt="x") as turn,
    ):
        return list(turn)


def stream_async(url: str, timeout: float = 30) -> object:
    async def ask() -> object:
        transport = AsyncTransport(Connection(url, None, timeout=timeout))
        try:
            async with client.AsyncSession(transport, SESSION).stream(prompt="x") as turn:
                return [event async for event in turn]
        finally:
            await transport.close()

    return asyncio.run(ask())


any_call = pytest.mark.parametrize("ask", [health, health_async, stream, stream_async])
streamed_call = pytest.mark.parametrize("ask", [stream, stream_async])


@any_call
def test_nobody_listens(ask: Ask) -> None:
    with pytest.raises(client.ConnectionFailed, match=f"{NOBODY}/"):
        ask(NOBODY)


@any_call
def test_silence(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(client.Timeout):
        ask(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.5)


@any_call
@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (b"", client.ConnectionLost, None),
        (PROXY_PAGE, client.ServerError, "HTTP 502 <h1>no luck"),
        (PAGE, client.InvalidAnswer, None),
    ],
    ids=["nothing", "a proxy's page", "a page"],
)
def test_another_answer(ask: Ask, answer_with: AnswerWith, answer: bytes, error: type[Exception], says: Any) -> None:
    with pytest.raises(error, match=says):
        ask(answer_with(answer))


@any_call
def test_an_error_answer_with_all_that_it_says(ask: Ask, answer_with: AnswerWith) -> None:
    with pytest.raises(client.RateLimited, match="the queue is full") as caught:
        ask(answer_with(BUSY))
    assert (caught.value.status, caught.value.retry_after, caught.value.code) == (429, 7.0, "queue_full")


@pytest.mark.parametrize("ask", [health, health_async])
def test_an_answer_cut_short(ask: Ask, answer_with: AnswerWith) -> None:
    with pytest.raises(client.ConnectionLost) as caught:
        ask(answer_with(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"status"'))
    assert not isinstance(caught.value, client.StreamBroken)


@streamed_call
@pytest.mark.parametrize("answer", [STREAM, STREAM + TOKEN, STREAM + TOKEN + b"event: token\nda", BROKEN_OFF])
def test_a_stream_that_ends_before_the_turn(ask: Ask, answer_with: AnswerWith, answer: bytes) -> None:
    with pytest.raises(client.StreamBroken):
        ask(answer_with(answer))


@streamed_call
def test_an_error_inside_a_stream(ask: Ask, answer_with: AnswerWith) -> None:
    error = (
        b'event: error\ndata: {"error": {"message": "lost a device", "type": "server_error", "code": "engine_error"}}'
    )
    with pytest.raises(client.ServerError, match="lost a device") as caught:
        ask(answer_with(STREAM + TOKEN + error + b"\n\n"))
    assert (caught.value.status, caught.value.request_id) == (None, "req_1")


@streamed_call
def test_an_event_that_is_not_djinns(ask: Ask, answer_with: AnswerWith) -> None:
    with pytest.raises(client.InvalidAnswer, match="token event"):
        ask(answer_with(STREAM + b'event: token\ndata: {"choices": []}\n\n'))


UNSENDABLE: list[TurnOptions] = [
    {"prompt": "x", "temperature": math.nan},
    {"prompt": "x", "logit_bias": {1: math.inf}},
    {"prompt": "\ud800"},
    {"prompt": cast("str", b"x")},
]


@pytest.mark.parametrize("options", UNSENDABLE)
def test_what_json_has_no_form_for_is_not_sent(options: TurnOptions, answer_with: AnswerWith) -> None:
    with closing(Transport(Connection(answer_with(b""), None, timeout=0.5))) as transport:
        session = client.Session(transport, SESSION)
        with pytest.raises(client.InvalidRequest):
            session.generate(**options)
        with pytest.raises(client.InvalidRequest), session.stream(**options):
            pytest.fail("a turn that cannot be sent has begun")


async def test_a_client_that_is_closed_sends_nothing(tmp_path: Path) -> None:
    (tmp_path / "session").touch()
    blocking, asynchronous = client.Djinn("http://127.0.0.1"), client.AsyncDjinn("http://127.0.0.1")
    blocking.close()
    await asynchronous.close()
    transport = Transport(Connection("http://127.0.0.1", None, timeout=5))
    transport.close()
    with pytest.raises(client.InvalidRequest, match="closed"):
        blocking.health()
    with pytest.raises(client.InvalidRequest, match="closed"):
        blocking.sessions.import_from(tmp_path / "session")
    with pytest.raises(client.InvalidRequest, match="closed"), client.Session(transport, SESSION).stream(prompt="x"):
        pytest.fail("a turn has begun")
    with pytest.raises(client.InvalidRequest, match="closed"):
        await asynchronous.health()


@pytest.mark.parametrize("kind", [client.Djinn, client.AsyncDjinn])
def test_a_key_or_an_address_that_cannot_be_one(kind: Callable[..., object]) -> None:
    for key in ("", "secret\n", "sec\0ret", "\ud800"):
        with pytest.raises(ValueError, match="api_key"):
            kind("http://127.0.0.1", api_key=key)
    for url in ("", "localhost:8000", "ftp://localhost", "http://", "http://a:b"):
        with pytest.raises(ValueError, match="base_url"):
            kind(url)


def _descendants(kind: type[Exception]) -> Iterator[type[Exception]]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)


@pytest.mark.parametrize("kind", list(_descendants(httpx.HTTPError)))
def test_every_httpx_error_has_a_place(kind: type[httpx.HTTPError]) -> None:
    """A new httpx with a new error fails here if nobody decided whether it leaves the request unsent."""
    assert issubclass(edge.translate(kind), client.TransportError)
    if edge.translate(kind) is client.ConnectionLost:
        places = {httpx.RequestError, httpx.HTTPStatusError, httpx.TransportError, httpx.RemoteProtocolError}
        places |= {httpx.NetworkError, httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.ProtocolError}
        assert kind in places


SERVER_ERRORS = [
    kind for kind in vars(app.domain.errors).values() if isinstance(kind, type) and issubclass(kind, Exception)
]


@pytest.mark.parametrize("error", SERVER_ERRORS)
def test_every_error_of_the_server_has_its_class(error: type[app.domain.errors.DjinnError]) -> None:
    """By its status in an answer, by its code in a stream: both lead to the same class.

    Only a wrong method has none: the client never uses one.
    """
    body = json.dumps({"error": {"message": "no", "type": error.type, "code": error.code, "param": "x"}})
    answered = errors.error_from_answer(error.status, {"x-request-id": "req_1", "retry-after": "3"}, body.encode())
    streamed = errors.error_from_event(body, request_id="req_1")
    assert type(answered) is type(streamed)
    assert (type(answered) is client.APIError) == (error.status == 405)
    assert isinstance(streamed, client.APIError)
    for seen in (answered, streamed):
        assert (seen.message, seen.type, seen.code, seen.param) == ("no", error.type, error.code, "x")
        assert seen.request_id == "req_1"
    assert (answered.status, answered.retry_after) == (error.status, 3.0)


@given(status=st.integers(300, 599), body=st.binary(), retry_after=st.text())
def test_any_other_body_is_an_error_too(status: int, body: bytes, retry_after: str) -> None:
    error = errors.error_from_answer(status, {"retry-after": retry_after}, body)
    assert isinstance(error, client.APIError)
    assert error.status == status
    assert error.message


@given(data=st.text())
def test_any_data_of_an_error_event_is_an_error(data: str) -> None:
    assert isinstance(errors.error_from_event(data, request_id=None), client.DjinnError)
