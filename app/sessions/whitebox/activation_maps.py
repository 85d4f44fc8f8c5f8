"""Maps of what sessions keep inside the model: the lens over layers and positions, read in slices, and norms."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from app.bridge.executor import EngineExecutor
from app.domain.activations import ActivationMap, ActivationNorms, LensRows
from app.domain.breakpoints import Positions, TensorData
from app.domain.values import SessionState
from app.messages import CloseMap, MapLens, OpenMap, ReadNorms
from app.sessions.session import Session
from app.sessions.whitebox.head_time import HeadTime

SLICE_S = 0.01
"""How long a slice is meant to take: about a step of a small model, as a turn that comes meanwhile waits for it."""
LEAST_SLICE, MOST_SLICE = 8, 64
"""Residual streams in a slice. The head's weights are read once for each: fewer would be hardly faster."""

LensTops = tuple[tuple[tuple[int, float], ...], ...]
"""For each residual stream, token ids with natural-log probabilities, best first."""


@dataclass(frozen=True, slots=True)
class LensMap:
    """A map, and the lens of each of its residual streams, layer by layer."""

    map: ActivationMap
    tops: LensTops


class ActivationMaps:
    """Reads maps of all sessions. Used on the event loop only.

    Each tenant has one map of each kind at a time. The slices of a lens give way to turns (`HeadTime`).
    """

    def __init__(self, executor: EngineExecutor, head: HeadTime) -> None:
        self._executor = executor
        self._head = head
        self._mapping: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By tenant."""
        self._measuring: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        """The same for norms, which do not wait for a lens: that can take seconds."""

    async def lens(self, session: Session, positions: Positions, layers: tuple[int, ...] | None, top_k: int) -> LensMap:
        """The `top_k` tokens that the final norm and the head make of each residual stream that is kept, after the
        layers given (None: all). The caller may be cancelled at any moment.

        Raises `FieldOutOfRange` for positions that are not in the history, and for too many.
        """
        async with self._mapping[session.owner]:
            try:
                found: ActivationMap = await self._executor.call(
                    lambda ticket: OpenMap(ticket, session.id, positions, layers)
                )
                return LensMap(found, await self._slices(session, found.count, top_k))
            finally:
                if session.state is not SessionState.CLOSED and self._executor.failure is None:
                    self._executor.post(lambda ticket: CloseMap(ticket, session.id))

    async def norms(
        self, session: Session, positions: Positions, layers: tuple[int, ...] | None, vector: TensorData | None
    ) -> ActivationNorms:
        """How long each of the same residual streams is, and its cosine to `vector`. Raises `FieldOutOfRange`."""
        async with self._measuring[session.owner]:
            measure: Callable[[], ActivationNorms] = await self._executor.call(
                lambda ticket: ReadNorms(ticket, session.id, positions, layers, vector)
            )
            return await asyncio.to_thread(measure)

    async def _slices(self, session: Session, count: int, top_k: int) -> LensTops:
        tops: list[tuple[tuple[int, float], ...]] = []
        size = LEAST_SLICE
        while (first := len(tops)) < count:
            end = min(count, first + size)
            make = partial(MapLens, session=session.id, first=first, end=end, top_k=top_k)
            found = await self._head.take(session.owner, make, LensRows)
            tops += found.rows
            size = max(LEAST_SLICE, min(MOST_SLICE, int((end - first) * SLICE_S / found.seconds)))
        return tuple(tops)
