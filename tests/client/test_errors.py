"""Every way to fail becomes the error that the tree promises."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import httpx_sse
import pytest
from hypothesis import given
from hypothesis import strategies as st

import app.domain.errors
import client
from client import edge, errors


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


def test_httpx_has_no_other_errors_than_these() -> None:
    """The rest are mistakes in this package's use of httpx, not events of the network."""
    exported = {value for value in vars(httpx).values() if isinstance(value, type) and issubclass(value, Exception)}
    network = {httpx.HTTPError, *_descendants(httpx.HTTPError)} - {httpx_sse.SSEError}
    misuse = {httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError, *_descendants(httpx.StreamError)}
    assert exported == network | misuse


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
