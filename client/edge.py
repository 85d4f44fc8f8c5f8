"""The edge to httpx: how a connection is set up, and what its errors become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import httpx_sse

from client.calls import Call
from client.errors import (
    ConnectionFailed,
    ConnectionLost,
    InvalidAnswer,
    Timeout,
    TransportError,
    error_from_answer,
)

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 5.0

KEEPALIVE_S = 60.0
"""Idle connections are closed before the server does so, after 75 s: a request sent at that moment would be lost."""

HTTPX_ERRORS: Mapping[type[httpx.HTTPError], type[TransportError]] = {
    httpx.ConnectError: ConnectionFailed,
    httpx.ConnectTimeout: ConnectionFailed,
    httpx.PoolTimeout: ConnectionFailed,
    httpx.ProxyError: ConnectionFailed,
    httpx.UnsupportedProtocol: ConnectionFailed,
    httpx.LocalProtocolError: ConnectionFailed,
    httpx.TimeoutException: Timeout,
    httpx.DecodingError: InvalidAnswer,
    httpx.TooManyRedirects: InvalidAnswer,
    httpx_sse.SSEError: InvalidAnswer,
    httpx.HTTPError: ConnectionLost,
}
"""An error of httpx becomes what its nearest ancestor in this table becomes."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the server is and how to reach it.

    `timeout` is how long the server may be silent, in seconds (None: for ever). A turn that is not streamed is silent
    until it is over.
    """

    base_url: str
    api_key: str | None = field(repr=False)
    timeout: float | None

    def options(self) -> dict[str, Any]:
        """What `httpx.Client` and `httpx.AsyncClient` are made with. Raises `ValueError` if the address is not HTTP."""
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise ValueError(f"base_url {self.base_url!r} is not a URL: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"base_url must be http://HOST[:PORT] or https://HOST[:PORT], not {self.base_url!r}")
        return {
            "base_url": url,
            "headers": {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"},
            "timeout": httpx.Timeout(self.timeout, connect=CONNECT_TIMEOUT_S),
            "limits": httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S),
        }


@contextmanager
def mapped_errors(*, lost: type[ConnectionLost] = ConnectionLost) -> Iterator[None]:
    """Turn errors of httpx raised in the block into ours; `lost` is what a broken connection becomes."""
    try:
        yield
    except httpx.HTTPError as error:
        kind = translate(type(error))
        raise (lost if kind is ConnectionLost else kind)(_describe(error)) from error


def translate(kind: type[httpx.HTTPError]) -> type[TransportError]:
    """Our class for an httpx error class."""
    return next(HTTPX_ERRORS[ancestor] for ancestor in kind.__mro__ if ancestor in HTTPX_ERRORS)


def _describe(error: httpx.HTTPError) -> str:
    """What happened and where; httpx leaves the text of some errors empty."""
    what = str(error) or type(error).__name__
    try:
        return f"{error.request.method} {error.request.url}: {what}"
    except RuntimeError:  # httpx's way to say that the error has no request
        return what


def to_request(http: httpx.Client | httpx.AsyncClient, call: Call[T]) -> httpx.Request:
    """The HTTP request of a call."""
    return http.build_request(call.method, call.path, params=call.params, json=call.json)


def read_answer(call: Call[T], response: httpx.Response) -> T:
    """What the call asked for, from an answer read whole. Raises `APIError` or `InvalidAnswer`."""
    check_status(response)
    try:
        return call.parse(response.content)
    except ValueError as error:
        message = f"{call.method} {response.url}: the answer is not what Djinn answers: {error}"
        raise InvalidAnswer(message, request_id=response.headers.get("x-request-id")) from error


def check_status(response: httpx.Response) -> None:
    """Raise the error that an answer, read whole, stands for, if it does."""
    if not response.is_success:
        raise error_from_answer(response.status_code, response.headers, response.content)
