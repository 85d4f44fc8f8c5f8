"""Breakpoints, and what a paused session shows and lets be changed."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from client import breakpoint_calls as calls
from client.breakpoint_models import BreakpointInfo, CheckpointInfo, Lens, Positions
from client.calls import UNSET, Seconds, given
from client.captures import Place
from client.edits import Feature, Kept, Vector, Where
from client.errors import NotFound
from client.tensors import ArrayLike, FloatArray
from client.transport import AsyncTransport


class AsyncBreakpoint:
    """A breakpoint of a session. `info` is what it does."""

    def __init__(self, transport: AsyncTransport, session: str, info: BreakpointInfo) -> None:
        self._transport = transport
        self._session = session
        self.info = info

    def __repr__(self) -> str:
        point = "" if self.info.point == "resid_post" else f", point={self.info.point!r}"
        return f"{type(self).__name__}(id={self.id!r}, action={self.info.action!r}, layers={self.info.layers}{point})"

    @property
    def id(self) -> str:
        """The id that checkpoints and captures name it by."""
        return self.info.id

    async def remove(self, *, timeout: Seconds = UNSET) -> None:
        """Take it from the session, which stays paused if it is. One that is gone already counts as removed."""
        with suppress(NotFound):
            await self._transport.send(calls.remove_breakpoint(self._session, self.id), timeout)


class AsyncCheckpoint(Place):
    """Where a session is paused. `info` is what the server last said about it; the rest raises `Conflict` once the
    session is no longer paused.
    """

    def __init__(self, transport: AsyncTransport, session: str, info: CheckpointInfo) -> None:
        super().__init__(info)
        self._transport = transport
        self._session = session

    async def read(self, positions: Positions = "all", *, timeout: Seconds = UNSET) -> FloatArray:
        """What stands at the point, a row for each position; in float32, or float16 if the model's is."""
        return await self._transport.send(calls.read_activation(self._session, positions), timeout)

    async def write(self, values: ArrayLike, *, timeout: Seconds = UNSET) -> None:
        """Put `values`, of the same shape, in the place of what stands there; they are rounded to the model's dtype.

        Raises `Unprocessable` for another shape and for values that are not finite.
        """
        self.info = await self._transport.send(calls.write_activation(self._session, values, self.info.dtype), timeout)

    async def edit(
        self,
        *,
        scale: float | None = None,
        add: Vector | Literal[True] | None = None,
        replace: Vector | Literal[True] | None = None,
        project_out: Vector | None = None,
        clamp: Vector | Literal[True] | None = None,
        ablate: Literal[True] | Vector | None = None,
        factor: float | None = None,
        source: Kept | None = None,
        feature: Feature | None = None,
        orthogonal_to: Vector | None = None,
        heads: Sequence[int] | None = None,
        neurons: Sequence[int] | None = None,
        experts: Sequence[int] | None = None,
        positions: Positions | None = None,
        keep_norm: bool | None = None,
        max_norm: float | None = None,
        where: Where | None = None,
        timeout: Seconds = UNSET,
    ) -> None:
        """Change what stands there on the server, `edit(scale=0.9)`: what there is, `EditOptions` says."""
        self.info = await self._transport.send(calls.edit_checkpoint(self._session, [given(locals())]), timeout)

    async def lens(self, *, top_k: int = 5, positions: Positions = "last", timeout: Seconds = UNSET) -> Lens:
        """What the model would say next at `positions` if the layers that are left did nothing."""
        return await self._transport.send(calls.read_lens(self._session, top_k, positions), timeout)
