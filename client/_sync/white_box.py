# Generated from client/_async by `python client/_generate.py`: make changes there.
"""Control of a session between its layers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

from client import breakpoint_calls as calls
from client._sync.breakpoints import Breakpoint, Checkpoint
from client._sync.turn import TurnStream, stream_turn
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
from client.transport import Transport


class WhiteBox:
    """What a session offers besides whole turns. `info` is what the server last said about it."""

    def __init__(self, transport: Transport, info: SessionInfo) -> None:
        self._transport = transport
        self.info = info

    @property
    def id(self) -> str:
        """The id that other calls and other clients know the session by."""
        return self.info.id

    def break_at(self, **options: Unpack[PauseOptions]) -> Breakpoint:
        """Pause after a layer: `break_at(layer=6)` stops every pass there, until `resume`."""
        return self._arm(pause_body(options))

    def capture_at(self, **options: Unpack[WhenOptions]) -> Breakpoint:
        """Record the residual stream after a layer, for `captures`, and go on."""
        return self._arm(capture_body(options))

    def steer(self, **options: Unpack[SteerOptions]) -> Breakpoint:
        """Change the residual stream after a layer, `steer(layer=6, scale=0.9)`, until the breakpoint is removed."""
        return self._arm(steer_body(options))

    def breakpoints(self) -> list[Breakpoint]:
        """What is armed, in the order in which it acts."""
        found = self._transport.send(calls.list_breakpoints(self.id))
        return [Breakpoint(self._transport, self.id, info) for info in found]

    def clear_breakpoints(self) -> None:
        """Remove every breakpoint."""
        self._transport.send(calls.clear_breakpoints(self.id))

    def checkpoint(self) -> Checkpoint:
        """Where the session is paused. Raises `Conflict` if it is not."""
        return Checkpoint(self._transport, self.id, self._transport.send(calls.get_checkpoint(self.id)))

    def resume(self, *, until: Until | None = None, edits: Sequence[EditOptions] = ()) -> Turn:
        """Go on with the paused turn and wait for its end or its next pause; `edits` are made first.

        Without `until` the next breakpoint pauses it. Raises `Conflict` if the session is not paused.
        """
        return self._transport.send(calls.resume(self.id, until, edits, stream=False))

    @contextmanager
    def resume_stream(self, *, until: Until | None = None, edits: Sequence[EditOptions] = ()) -> Iterator[TurnStream]:
        """Go on like `resume` and read new tokens as they come. Leaving the block early cancels the turn."""
        with stream_turn(self._transport, calls.resume(self.id, until, edits, stream=True)) as turn:
            yield turn

    def step(self, *, layer: int | None = None) -> Turn:
        """Go on to after `layer` of this pass, or without one to the same layer of the next token, and pause there."""
        return self.resume(until="next_token" if layer is None else layer)

    def lens_map(
        self, *, positions: Positions = "last", layers: Sequence[int] | None = None, top_k: int = 1
    ) -> LensMap:
        """The logit lens at every layer that `capture_at` has recorded, and where the session is paused.

        At most 64 positions. While turns run, it takes its time: it gives way to their tokens.
        """
        return self._transport.send(calls.read_lens_map(self.id, positions, layers, top_k))

    def norms(
        self, *, positions: Positions = "last", layers: Sequence[int] | None = None, vector: str | None = None
    ) -> Norms:
        """How long the same residual streams are, and the cosine of each to a named vector."""
        return self._transport.send(calls.read_norms(self.id, positions, layers, vector))

    def captures(self) -> Captures:
        """What `capture_at` has recorded so far."""
        return self._transport.send(calls.read_captures(self.id))

    def clear_captures(self) -> None:
        """Forget what has been recorded."""
        self._transport.send(calls.clear_captures(self.id))

    def _arm(self, body: Mapping[str, Any]) -> Breakpoint:
        return Breakpoint(self._transport, self.id, self._transport.send(calls.arm(self.id, body)))
