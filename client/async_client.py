"""The client for asyncio: the blocking one's methods, awaited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Self, Unpack

from httpx_sse import EventSource

from client import calls
from client.calls import TurnOptions
from client.edge import DEFAULT_TIMEOUT_S, Connection, mapped_errors
from client.errors import StreamBroken
from client.models import Health, MemoryMap, Model, SessionInfo, SessionState, TokenEvent, Turn
from client.stream import TurnDecoder
from client.transport import AsyncTransport


class AsyncTurnStream:
    """The running turn: iterate to get its tokens, then read `turn`."""

    def __init__(self, source: EventSource) -> None:
        self._decoder = TurnDecoder(source.response.headers.get("x-request-id"))
        self._tokens = self._read(source)

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self._tokens

    async def _read(self, source: EventSource) -> AsyncGenerator[TokenEvent, None]:
        with mapped_errors(lost=StreamBroken):
            async with aclosing(source.aiter_sse()) as events:
                async for event in events:
                    tokens = self._decoder.feed(event)
                    if tokens is not None:
                        yield tokens
        self._decoder.end()

    @property
    def turn(self) -> Turn:
        """The whole turn. Raises `RuntimeError` while it is not over."""
        return self._decoder.turn

    async def aclose(self) -> None:
        """Stop reading."""
        await self._tokens.aclose()


class AsyncSession:
    """A session on the server. `info` is what the server last said about it."""

    def __init__(self, transport: AsyncTransport, info: SessionInfo) -> None:
        self._transport = transport
        self.info = info

    @property
    def id(self) -> str:
        """The id that other calls and other clients know the session by."""
        return self.info.id

    async def generate(self, **options: Unpack[TurnOptions]) -> Turn:
        """Run one turn and wait for its end."""
        return await self._transport.send(calls.generate(self.id, options, stream=False))

    @asynccontextmanager
    async def stream(self, **options: Unpack[TurnOptions]) -> AsyncIterator[AsyncTurnStream]:
        """Run one turn and read its tokens as they come. Leaving the block early cancels the turn."""
        async with (
            self._transport.stream(calls.generate(self.id, options, stream=True)) as source,
            aclosing(AsyncTurnStream(source)) as turn,
        ):
            yield turn

    async def cancel(self) -> SessionInfo:
        """End the running turn, whoever started it; its reader gets what was generated. Raises `Conflict`."""
        self.info = await self._transport.send(calls.cancel_turn(self.id))
        return self.info

    async def fork(self) -> AsyncSession:
        """A new session with the same history."""
        return AsyncSession(self._transport, await self._transport.send(calls.fork_session(self.id)))

    async def rewind(self, to_token: int) -> SessionInfo:
        """Drop every token of the history from position `to_token` on."""
        self.info = await self._transport.send(calls.rewind_session(self.id, to_token))
        return self.info

    async def refresh(self) -> SessionInfo:
        """Ask the server how the session is."""
        self.info = await self._transport.send(calls.get_session(self.id))
        return self.info

    async def close(self) -> None:
        """End the session; the server frees everything it held."""
        await self._transport.send(calls.close_session(self.id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()


class AsyncSessions:
    """The sessions on the server that belong to this API key."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, *, metadata: Mapping[str, str] | None = None, ttl_s: int | None = None) -> AsyncSession:
        """Open a session. As a context manager it is closed at the end of the block."""
        info = await self._transport.send(calls.create_session(metadata, ttl_s))
        return AsyncSession(self._transport, info)

    async def get(self, session: str) -> AsyncSession:
        """The session with this id. Raises `NotFound`."""
        return AsyncSession(self._transport, await self._transport.send(calls.get_session(session)))

    async def list(self, *, state: SessionState | None = None) -> AsyncIterator[AsyncSession]:
        """Every session, or every one in `state`; asks for the next page when one is used up."""
        after: str | None = ""
        while after is not None:
            page = await self._transport.send(calls.list_sessions(state, after))
            for info in page.data:
                yield AsyncSession(self._transport, info)
            after = page.next_after


class AsyncDjinn:
    """A Djinn server. Use it as a context manager, or await `close` when done.

    No request is ever repeated: a turn that may have run must not run twice unasked. `ConnectionFailed` and
    `RateLimited` are the errors after which repeating is safe.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        self._transport = AsyncTransport(Connection(base_url, api_key, timeout))
        self.sessions = AsyncSessions(self._transport)

    async def memory(self) -> MemoryMap:
        """Where the engine's memory is, and how busy it is."""
        return await self._transport.send(calls.memory())

    async def models(self) -> tuple[Model, ...]:
        """The models that the server runs."""
        return await self._transport.send(calls.models())

    async def health(self) -> Health:
        """Whether the server is alive; needs no API key."""
        return await self._transport.send(calls.health())

    async def close(self) -> None:
        """Close every connection. Sessions stay on the server."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()
