"""The edge to httpx: how a connection is set up, and what its errors become."""

import ssl
from collections.abc import AsyncIterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, BinaryIO, TypeVar

import httpx
import httpx_sse

from client.calls import Call
from client.errors import (
    ConnectionFailed,
    ConnectionLost,
    InvalidAnswer,
    InvalidRequest,
    Timeout,
    TransportError,
    error_from_answer,
)

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 5.0

OCTET_STREAM = "application/octet-stream"

KEEPALIVE_S = 60.0
"""Idle connections are closed before the server does so, after 75 s: a request sent at that moment would be lost."""

HTTPX_ERRORS: Mapping[type[httpx.HTTPError], type[TransportError]] = {
    httpx.ConnectError: ConnectionFailed,
    httpx.ConnectTimeout: ConnectionFailed,
    httpx.PoolTimeout: ConnectionFailed,
    httpx.ProxyError: ConnectionFailed,
    httpx.UnsupportedProtocol: ConnectionFailed,
    httpx.LocalProtocolError: InvalidRequest,
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
    until it is over. `max_retries` is how often the client retries a call.
    """

    base_url: str
    api_key: str | None = field(repr=False)
    timeout: float | None
    max_retries: int = 0

    def options(self) -> dict[str, Any]:
        """What `httpx.Client` and `httpx.AsyncClient` are made with.

        Raises `ValueError` if the address is not HTTP, or the key is empty or not printable.
        """
        if self.max_retries < 0:
            raise ValueError(f"max_retries must be 0 or more, not {self.max_retries}")
        if self.api_key == "":
            raise ValueError("api_key must not be empty; leave it out for a server without keys")
        if self.api_key is not None and not self.api_key.isprintable():
            raise ValueError("api_key must not have control characters, such as the newline at the end of a file")
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise ValueError(f"base_url {self.base_url!r} is not a URL: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"base_url must be http://HOST[:PORT] or https://HOST[:PORT], not {self.base_url!r}")
        return {
            "base_url": url,
            "headers": {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}".encode()},
            "timeout": httpx.Timeout(self.timeout, connect=CONNECT_TIMEOUT_S),
            "verify": _tls(),
            "limits": httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S),
        }


@cache
def _tls() -> ssl.SSLContext:
    """How httpx checks certificates; one for all connections, because to read them takes tens of milliseconds."""
    return httpx.create_ssl_context()


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


def to_request(http: httpx.Client | httpx.AsyncClient, call: Call[T], key: str | None = None) -> httpx.Request:
    """The HTTP request of a call, with its `Idempotency-Key`. Raises `InvalidRequest`."""
    headers = {} if key is None else {"Idempotency-Key": key}
    if call.tensor is not None:
        return _build(http, call, content=call.tensor, headers={**headers, "Content-Type": OCTET_STREAM})
    return _build(http, call, json=call.json, headers=headers)


def to_upload(
    http: httpx.Client | httpx.AsyncClient, call: Call[T], content: BinaryIO | AsyncIterable[bytes], size: int
) -> httpx.Request:
    """The HTTP request of a call whose body is a session file of `size` bytes. Raises `InvalidRequest`."""
    headers = {"Content-Type": OCTET_STREAM, "Content-Length": str(size)}
    return _build(http, call, content=content, headers=headers)


def _build(http: httpx.Client | httpx.AsyncClient, call: Call[T], **body: Any) -> httpx.Request:
    if http.is_closed:
        raise InvalidRequest(f"{call.method} {call.path}: the client has been closed")
    try:
        return http.build_request(call.method, call.path, params=call.params, **body)
    except (TypeError, ValueError) as error:  # NaN, bytes, lone surrogates
        raise InvalidRequest(f"{call.method} {call.path}: {error}") from error


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
