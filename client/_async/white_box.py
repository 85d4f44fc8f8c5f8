"""Control of a session between its layers."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Unpack

from client import breakpoint_calls as calls
from client._async.breakpoints import AsyncBreakpoint, AsyncCheckpoint
from client._async.turn import AsyncTurnStream, stream_turn
from client.breakpoint_models import LensMap, Norms, Positions
from client.captures import Captures
from client.edits import (
    EditOptions,
    PauseOptions,
    SteerOptions,
    Until,
    WhenOptions,
    capture_body,
    pause_body,
    steer_body,
)
from client.models import SessionInfo, Turn
from client.transport import AsyncTransport


class AsyncWhiteBox:
    """What a session offers besides whole turns. `info` is what the server last said about it."""

    def __init__(self, transport: AsyncTransport, info: SessionInfo) -> None:
        self._transport = transport
        self.info = info

    @property
    def id(self) -> str:
        """The id that other calls and other clients know the session by."""
        return self.info.id

    async def break_at(self, **options: Unpack[PauseOptions]) -> AsyncBreakpoint:
        """Pause after a layer: `break_at(layer=6)` stops every pass there, until `resume`."""
        return await self._arm(pause_body(options))

    async def capture_at(self, **options: Unpack[WhenOptions]) -> AsyncBreakpoint:
        """Record the residual stream after a layer, for `captures`, and go on."""
        return await self._arm(capture_body(options))

    async def steer(self, **options: Unpack[SteerOptions]) -> AsyncBreakpoint:
        """Change the residual stream after a layer, `steer(layer=6, scale=0.9)`, until the breakpoint is removed."""
        return await self._arm(steer_body(options))

    async def breakpoints(self) -> list[AsyncBreakpoint]:
        """What is armed, in the order in which it acts."""
        found = await self._transport.send(calls.list_breakpoints(self.id))
        return [AsyncBreakpoint(self._transport, self.id, info) for info in found]

    async def clear_breakpoints(self) -> None:
        """Remove every breakpoint."""
        await self._transport.send(calls.clear_breakpoints(self.id))

    async def checkpoint(self) -> AsyncCheckpoint:
        """Where the session is paused. Raises `Conflict` if it is not."""
        return AsyncCheckpoint(self._transport, self.id, await self._transport.send(calls.get_checkpoint(self.id)))

    async def resume(self, *, until: Until | None = None, edits: Sequence[EditOptions] = ()) -> Turn:
        """Go on with the paused turn and wait for its end or its next pause; `edits` are made first.

        Without `until` the next breakpoint pauses it. Raises `Conflict` if the session is not paused.
        """
        return await self._transport.send(calls.resume(self.id, until, edits, stream=False))

    @asynccontextmanager
    async def resume_stream(
        self, *, until: Until | None = None, edits: Sequence[EditOptions] = ()
    ) -> AsyncIterator[AsyncTurnStream]:
        """Go on like `resume` and read new tokens as they come. Leaving the block early cancels the turn."""
        async with stream_turn(self._transport, calls.resume(self.id, until, edits, stream=True)) as turn:
            yield turn

    async def step(self, *, layer: int | None = None) -> Turn:
        """Go on to after `layer` of this pass, or without one to the same layer of the next token, and pause there."""
        return await self.resume(until="next_token" if layer is None else layer)

    async def lens_map(
        self, *, positions: Positions = "last", layers: Sequence[int] | None = None, top_k: int = 1
    ) -> LensMap:
        """The logit lens at every layer that `capture_at` has recorded, and where the session is paused.

        At most 64 positions. While turns run, it takes its time: it gives way to their tokens.
        """
        return await self._transport.send(calls.read_lens_map(self.id, positions, layers, top_k))

    async def norms(
        self, *, positions: Positions = "last", layers: Sequence[int] | None = None, vector: str | None = None
    ) -> Norms:
        """How long the same residual streams are, and the cosine of each to a named vector."""
        return await self._transport.send(calls.read_norms(self.id, positions, layers, vector))

    async def captures(self) -> Captures:
        """What `capture_at` has recorded so far."""
        return await self._transport.send(calls.read_captures(self.id))

    async def clear_captures(self) -> None:
        """Forget what has been recorded."""
        await self._transport.send(calls.clear_captures(self.id))

    async def _arm(self, body: Mapping[str, Any]) -> AsyncBreakpoint:
        return AsyncBreakpoint(self._transport, self.id, await self._transport.send(calls.arm(self.id, body)))
