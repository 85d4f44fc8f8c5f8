"""A session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Self, Unpack

from client import calls
from client._async.turn import AsyncTurnStream, stream_turn
from client._async.white_box import AsyncWhiteBox
from client.calls import TurnOptions
from client.errors import DjinnError, NotFound
from client.models import History, Phase, PhaseChange, SessionInfo, Turn
from client.transport import AsyncTransport


class AsyncSession(AsyncWhiteBox):
    """A session on the server. `info` is what the server last said about it.

    As a context manager it is closed at the end of the block if this object has opened it. One that was found by its
    id stays.
    """

    def __init__(self, transport: AsyncTransport, info: SessionInfo, *, is_found: bool = False) -> None:
        super().__init__(transport, info)
        self._is_found = is_found

    async def generate(self, **options: Unpack[TurnOptions]) -> Turn:
        """Run one turn and wait for its end, or until a breakpoint pauses it."""
        return await self._transport.send(calls.generate(self.id, options, stream=False))

    @asynccontextmanager
    async def stream(self, **options: Unpack[TurnOptions]) -> AsyncIterator[AsyncTurnStream]:
        """Run one turn and read its tokens as they come. Leaving the block early cancels the turn."""
        async with stream_turn(self._transport, calls.generate(self.id, options, stream=True)) as turn:
            yield turn

    async def cancel(self) -> SessionInfo:
        """End the running or paused turn, even of another client; its reader gets its text. Raises `Conflict`."""
        self.info = await self._transport.send(calls.cancel_turn(self.id))
        return self.info

    async def fork(self) -> AsyncSession:
        """A new session with the same history and breakpoints, and paused in the same place if this one is paused."""
        return AsyncSession(self._transport, await self._transport.send(calls.fork_session(self.id)))

    async def export_to(self, path: str | Path) -> None:
        """Write the session to a file that `djinn.sessions.import_from` takes. Raises `Conflict` under a turn."""
        await self._transport.download(calls.export_session(self.id), Path(path))

    async def rewind(self, to_token: int) -> SessionInfo:
        """Drop every token of the history from position `to_token` on."""
        self.info = await self._transport.send(calls.rewind_session(self.id, to_token))
        return self.info

    async def history(self, *, pieces: bool = False) -> History:
        """Every token of the session, and their text."""
        return await self._transport.send(calls.get_history(self.id, pieces=pieces))

    async def set_phase(self, phase: Phase, *, resume_in_ms: float | None = None) -> PhaseChange:
        """Say what the session is doing; with `io_wait` and `idle`, also when it will go on. Raises `Conflict`.

        Returns without waiting for KV that moves because of it.
        """
        return await self._transport.send(calls.set_phase(self.id, phase, resume_in_ms))

    @asynccontextmanager
    async def io_wait(self, *, resume_in_ms: float | None = None) -> AsyncIterator[PhaseChange]:
        """Go around a tool call: the phase is `io_wait` in the block, and `ready` after it, also if it raises.

        `resume_in_ms` is how long the block will take, as far as is known: KV is then back when it ends.
        """
        change = await self.set_phase("io_wait", resume_in_ms=resume_in_ms)
        try:
            yield change
        except BaseException:
            with suppress(DjinnError):  # the block's own error tells more
                await self.set_phase("ready")
            raise
        await self.set_phase("ready")

    async def refresh(self) -> SessionInfo:
        """Ask the server how the session is."""
        self.info = await self._transport.send(calls.get_session(self.id))
        return self.info

    async def close(self) -> None:
        """End the session; the server frees everything it held. One that is gone already counts as closed."""
        with suppress(NotFound):
            await self._transport.send(calls.close_session(self.id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, raised: type[BaseException] | None, *_rest: object) -> None:
        if self._is_found:
            return
        with nullcontext() if raised is None else suppress(DjinnError):  # the block's own error tells more
            await self.close()
