"""Maps of what sessions keep inside the model: the lens over layers and positions, read in slices, and norms."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from app.bridge.executor import EngineExecutor
from app.domain.activations import ActivationMap, ActivationNorms, LensRows
from app.domain.breakpoints import Positions, TensorData
from app.domain.values import SessionState
from app.messages import CloseMap, MapLens, OpenMap, ReadNorms
from app.sessions.session import Session

SHARE = 0.1
"""Of the engine's time, that all maps together take while turns are under way: tokens wait for no more."""
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

    The engine computes a slice of a map between two steps. While turns are under way, it rests after each slice. Each
    tenant has one map of each kind at a time, and the slices of several tenants take turns.
    """

    def __init__(self, executor: EngineExecutor, any_runs: Callable[[], bool]) -> None:
        """`any_runs` says whether any turn is under way."""
        self._executor = executor
        self._any_runs = any_runs
        self._mapping: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By tenant."""
        self._measuring: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        """The same for norms, which do not wait for a lens: that can take seconds."""
        self._slicing = asyncio.Lock()
        self._rests_until = 0.0

    async def lens(self, session: Session, positions: Positions, layers: tuple[int, ...] | None, top_k: int) -> LensMap:
        """The `top_k` tokens that the final norm and the head make of each residual stream that is kept, after the
        layers given (None: all). Whoever waits may be cancelled at any moment.

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
            found = await self._slice(lambda ticket, a=first, b=end: MapLens(ticket, session.id, a, b, top_k))
            tops += found.rows
            size = max(LEAST_SLICE, min(MOST_SLICE, int((end - first) * SLICE_S / found.seconds)))
        return tuple(tops)

    async def _slice(self, make: Callable[..., MapLens]) -> LensRows:
        """Wait until it is time for the next slice of anybody, and have it computed."""
        await self._slicing.acquire()
        try:
            rest = self._rests_until - time.perf_counter()
            if rest > 0 and self._any_runs():
                await asyncio.sleep(rest)
        except BaseException:
            self._slicing.release()
            raise
        # The engine computes it though its client leaves, so that the rest after it is due all the same.
        return await asyncio.shield(self._computed(make))

    async def _computed(self, make: Callable[..., MapLens]) -> LensRows:
        """The slice. Then others may wait for the next one."""
        try:
            found: LensRows = await self._executor.call(make)
            self._rests_until = time.perf_counter() + found.seconds * (1 / SHARE - 1)
            return found
        finally:
            self._slicing.release()
