"""The blocking client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self, Unpack

from httpx_sse import EventSource

from client import calls
from client.calls import TurnOptions
from client.edge import DEFAULT_TIMEOUT_S, Connection, mapped_errors
from client.errors import StreamBroken
from client.models import Health, MemoryMap, Model, SessionInfo, SessionState, TokenEvent, Turn
from client.stream import TurnDecoder
from client.transport import Transport


class TurnStream:
    """The running turn: iterate to get its tokens, then read `turn`."""

    def __init__(self, source: EventSource) -> None:
        self._decoder = TurnDecoder(source.response.headers.get("x-request-id"))
        self._tokens = self._read(source)

    def __iter__(self) -> Iterator[TokenEvent]:
        return self._tokens

    def _read(self, source: EventSource) -> Iterator[TokenEvent]:
        with mapped_errors(lost=StreamBroken):
            for event in source.iter_sse():
                tokens = self._decoder.feed(event)
                if tokens is not None:
                    yield tokens
        self._decoder.end()

    @property
    def turn(self) -> Turn:
        """The whole turn. Raises `RuntimeError` while it is not over."""
        return self._decoder.turn


class Session:
    """A session on the server. `info` is what the server last said about it."""

    def __init__(self, transport: Transport, info: SessionInfo) -> None:
        self._transport = transport
        self.info = info

    @property
    def id(self) -> str:
        """The id that other calls and other clients know the session by."""
        return self.info.id

    def generate(self, **options: Unpack[TurnOptions]) -> Turn:
        """Run one turn and wait for its end."""
        return self._transport.send(calls.generate(self.id, options, stream=False))

    @contextmanager
    def stream(self, **options: Unpack[TurnOptions]) -> Iterator[TurnStream]:
        """Run one turn and read its tokens as they come. Leaving the block early cancels the turn."""
        with self._transport.stream(calls.generate(self.id, options, stream=True)) as source:
            yield TurnStream(source)

    def cancel(self) -> SessionInfo:
        """End the running turn, whoever started it; its reader gets what was generated. Raises `Conflict`."""
        self.info = self._transport.send(calls.cancel_turn(self.id))
        return self.info

    def fork(self) -> Session:
        """A new session with the same history."""
        return Session(self._transport, self._transport.send(calls.fork_session(self.id)))

    def rewind(self, to_token: int) -> SessionInfo:
        """Drop every token of the history from position `to_token` on."""
        self.info = self._transport.send(calls.rewind_session(self.id, to_token))
        return self.info

    def refresh(self) -> SessionInfo:
        """Ask the server how the session is."""
        self.info = self._transport.send(calls.get_session(self.id))
        return self.info

    def close(self) -> None:
        """End the session; the server frees everything it held."""
        self._transport.send(calls.close_session(self.id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class Sessions:
    """The sessions on the server that belong to this API key."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, *, metadata: Mapping[str, str] | None = None, ttl_s: int | None = None) -> Session:
        """Open a session. As a context manager it is closed at the end of the block."""
        return Session(self._transport, self._transport.send(calls.create_session(metadata, ttl_s)))

    def get(self, session: str) -> Session:
        """The session with this id. Raises `NotFound`."""
        return Session(self._transport, self._transport.send(calls.get_session(session)))

    def list(self, *, state: SessionState | None = None) -> Iterator[Session]:
        """Every session, or every one in `state`; asks for the next page when one is used up."""
        after: str | None = ""
        while after is not None:
            page = self._transport.send(calls.list_sessions(state, after))
            yield from (Session(self._transport, info) for info in page.data)
            after = page.next_after


class Djinn:
    """A Djinn server. Use it as a context manager, or call `close` when done.

    No request is ever repeated: a turn that may have run must not run twice unasked. `ConnectionFailed` and
    `RateLimited` are the errors after which repeating is safe.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        self._transport = Transport(Connection(base_url, api_key, timeout))
        self.sessions = Sessions(self._transport)

    def memory(self) -> MemoryMap:
        """Where the engine's memory is, and how busy it is."""
        return self._transport.send(calls.memory())

    def models(self) -> tuple[Model, ...]:
        """The models that the server runs."""
        return self._transport.send(calls.models())

    def health(self) -> Health:
        """Whether the server is alive; needs no API key."""
        return self._transport.send(calls.health())

    def close(self) -> None:
        """Close every connection. Sessions stay on the server."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()
