"""The edge to httpx: how a connection is set up, and what its errors become."""

import os
import ssl
from collections.abc import AsyncIterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, BinaryIO, Self, TypeVar

import httpx
import httpx_sse

from client.calls import UNSET, Call, Seconds
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

URL_VARIABLE = "DJINN_BASE_URL"
KEY_VARIABLE = "DJINN_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
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


def address_of(url: str | None) -> str:
    """Where the server is: what the user says, or else `DJINN_BASE_URL`."""
    if url is not None:
        return url
    return os.environ.get(URL_VARIABLE) or DEFAULT_URL


@dataclass(frozen=True)
class Connection:
    """Where the server is and how to reach it.

    `timeout` is how long the server may be silent, in seconds (None: for ever). A turn that is not streamed is silent
    until it is over. `max_retries` is how often the client retries a call. Raises `ValueError` if the address is not
    HTTP, the key is empty or not printable, or a number is too small.
    """

    base_url: str
    api_key: str | None = field(repr=False)
    timeout: float | None
    max_retries: int = 0

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries must be 0 or more, not {self.max_retries}")
        if self.api_key == "":
            raise ValueError("api_key must not be empty; leave it out for a server without keys")
        if self.api_key is not None and not self.api_key.isprintable():
            raise ValueError("api_key must not have control characters, such as the newline at the end of a file")
        if self.url.scheme not in ("http", "https") or not self.url.host:
            raise ValueError(f"base_url must be http://HOST[:PORT] or https://HOST[:PORT], not {self.base_url!r}")
        _limits(self.timeout)

    @cached_property
    def url(self) -> httpx.URL:
        """The address."""
        try:
            return httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise ValueError(f"base_url {self.base_url!r} is not a URL: {error}") from error

    @cached_property
    def headers(self) -> dict[str, bytes]:
        """What every request has."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}".encode()}

    def options(self) -> dict[str, Any]:
        """What `httpx.Client` and `httpx.AsyncClient` are made with."""
        return {
            "base_url": self.url,
            "headers": self.headers,
            "timeout": _limits(self.timeout),
            "verify": _tls(),
            "limits": httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S),
        }

    def changed(self, timeout: Seconds, max_retries: int | None) -> Self:
        """The same with what is given."""
        return replace(
            self,
            timeout=self.timeout if timeout is UNSET else timeout,
            max_retries=self.max_retries if max_retries is None else max_retries,
        )


def _limits(timeout: float | None) -> httpx.Timeout:
    if timeout is None:
        return httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    if not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, or None to wait for ever, not {timeout}")
    return httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT_S))


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
        return f"{error.request.method} {shown(error.request.url)}: {what}"
    except RuntimeError:  # httpx's way to say that the error has no request
        return what


def shown(url: httpx.URL) -> str:
    """An address as it may be shown: without a password."""
    return str(url.copy_with(userinfo=b""))


def to_request(
    http: httpx.Client | httpx.AsyncClient,
    connection: Connection,
    call: Call[T],
    timeout: Seconds = UNSET,
    *,
    key: str | None = None,
    file: tuple[BinaryIO | AsyncIterable[bytes], int] | None = None,
) -> httpx.Request:
    """The HTTP request of a call, with its `Idempotency-Key`, or with a file of so many bytes as its body or in a form.

    Raises `InvalidRequest`, and `ValueError` for a timeout that is not above 0.
    """
    if http.is_closed:
        raise InvalidRequest(f"{call.method} {call.path}: the client has been closed")
    headers: dict[str, Any] = {**connection.headers, **call.headers}
    body: dict[str, Any] = {"json": call.json}
    if key is not None:
        headers["Idempotency-Key"] = key
    if call.tensor is not None:
        headers["Content-Type"], body = OCTET_STREAM, {"content": call.tensor}
    if file is not None and call.form is not None:
        small = {name: (name, each) for name, each in call.form.items() if isinstance(each, bytes)}
        fields = {name: each for name, each in call.form.items() if name not in small}
        body = {"data": fields, "files": {**small, call.file: (call.file, file[0])}}
    elif file is not None:
        body = {"content": file[0]}
        headers |= {"Content-Type": OCTET_STREAM, "Content-Length": str(file[1])}
    limits = _limits(connection.timeout if timeout is UNSET else timeout)
    url = connection.url.copy_with(raw_path=connection.url.raw_path.rstrip(b"/") + call.path.encode())
    try:
        return http.build_request(call.method, url, params=call.params, headers=headers, timeout=limits, **body)
    except (TypeError, ValueError) as error:  # NaN, bytes, lone surrogates
        raise InvalidRequest(f"{call.method} {call.path}: {error}") from error


_responses: ContextVar[list[httpx.Response] | None] = ContextVar("_responses", default=None)


@contextmanager
def raw_responses() -> Iterator[list[httpx.Response]]:
    """The HTTP answers that this thread or task gets in the block, oldest first, those of errors and retries too.

    For the status and the headers: `responses[-1].headers["X-Request-ID"]`. Each is complete once its call is over.
    """
    responses: list[httpx.Response] = []
    token = _responses.set(responses)
    try:
        yield responses
    finally:
        _responses.reset(token)


def note_response(response: httpx.Response) -> None:
    """Put an answer on the list of `raw_responses`, if there is one."""
    responses = _responses.get()
    if responses is not None:
        responses.append(response)


def read_answer(call: Call[T], response: httpx.Response) -> T:
    """What the call asked for, from an answer read whole. Raises `APIError` or `InvalidAnswer`."""
    check_status(response)
    try:
        return call.parse(response.content)
    except ValueError as error:
        message = f"{call.method} {shown(response.url)}: the answer is not what Djinn answers: {error}"
        raise InvalidAnswer(message, request_id=response.headers.get("x-request-id")) from error


def check_status(response: httpx.Response) -> None:
    """Raise the error that an answer, read whole, stands for, if it does."""
    if not response.is_success:
        raise error_from_answer(response.status_code, response.headers, response.content)
