"""What clients see and change inside the model of a session: breakpoints, checkpoints, maps."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial

import numpy as np
from numpy.typing import NDArray

from app.domain.activations import (
    Activation,
    ActivationMap,
    ActivationNorms,
    Attribution,
    Captures,
    Dictionary,
    FeatureRows,
    LensAsk,
    LensRows,
)
from app.domain.breakpoints import Breakpoint, Edit, Positions, TensorData, check_bytes, check_work
from app.domain.errors import FieldOutOfRange, JournalUnavailable, NotDurable, NotFound
from app.domain.points import Point
from app.domain.values import SessionState
from app.engine_process.executor import EngineExecutor
from app.messages import (
    Arm,
    Attribute,
    ClearCaptures,
    CloseMap,
    Disarm,
    EditCheckpoint,
    Lens,
    MapLens,
    OpenMap,
    PoolCaptures,
    ReadCaptures,
    ReadCheckpoint,
    ReadFeatures,
    ReadKept,
    ReadLogits,
    ReadNorms,
    WriteCheckpoint,
)
from app.sessions.keeper import SessionKeeper, vector_bytes
from app.sessions.session import Session

MAX_BREAKPOINTS = 64
MAX_LENS_POSITIONS = 64
"""In one call, which is one answer."""


class Whitebox:
    """Breakpoints, checkpoints and maps of all sessions. Used on the event loop only.

    What is about a checkpoint raises `WrongState` unless the session is paused.
    """

    def __init__(self, executor: EngineExecutor, keeper: SessionKeeper) -> None:
        self._executor = executor
        self._keeper = keeper
        self._looking: defaultdict[tuple[str | None, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        """A tenant has one look of each kind at a time: a map can take seconds."""

    async def arm(self, session: Session, breakpoint: Breakpoint) -> None:
        """Add a breakpoint, whatever the session is doing; when this returns it is armed and durable. It is in
        `Session.breakpoints` from before the engine has it until after: a pause that it makes finds it.

        On an error there is no such breakpoint. Raises:
        - `FieldOutOfRange` if the session has too many breakpoints, or too much to do in a step;
        - `WrongState` if the breakpoint pauses and a turn runs that cannot pause;
        - `JournalUnavailable`, and `DiskShort` if the journal's disk has no room for its vectors.
        """
        if len(session.breakpoints) >= MAX_BREAKPOINTS:
            raise FieldOutOfRange(
                f"session {session.id} has {MAX_BREAKPOINTS} breakpoints, the most allowed: remove some",
                param="breakpoints",
            )
        armed = [*session.breakpoints.values(), breakpoint]
        check_work(armed[:-1], breakpoint)
        check_bytes(armed, param="breakpoints")
        with self._keeper.room.claiming(0 if session.ephemeral else vector_bytes([breakpoint])):
            session.breakpoints[breakpoint.id] = breakpoint
            try:
                await self._executor.call(lambda ticket: Arm(ticket, session.id, breakpoint))
                self._changed(session)
                await self._keeper.settled(session)
            except BaseException as error:  # a client that has gone does not know its id either
                session.breakpoints.pop(breakpoint.id, None)
                if session.state is not SessionState.CLOSED and self._executor.failure is None:
                    self._executor.post(lambda ticket: Disarm(ticket, session.id, breakpoint.id))
                    self._changed(session)
                if isinstance(error, NotDurable):
                    raise JournalUnavailable(f"no breakpoint was armed: {error.reason}") from error
                raise

    def arm_now(self, session: Session, *breakpoints: Breakpoint) -> None:
        """Add breakpoints that do not pause to a session that lives for one call, before its turn, without waiting."""
        for each in breakpoints:
            session.breakpoints[each.id] = each
            self._executor.post(partial(Arm, session=session.id, breakpoint=each))

    async def logits(self, sessions: Sequence[Session], token_ids: Sequence[int] | None) -> NDArray[np.float32]:
        """The logits of these tokens (None: of all) after what has been recorded in the sessions, `[rows, tokens]`.
        Raises `ActivationsFull` if some of it found no room.
        """
        asked = None if token_ids is None else tuple(token_ids)
        read: Callable[[], TensorData] = await self._executor.call(
            partial(ReadLogits, sessions=tuple(each.id for each in sessions), token_ids=asked)
        )
        found = await asyncio.to_thread(read)
        return np.frombuffer(found.data, "<f4").reshape(found.shape)

    async def disarm(self, session: Session, breakpoint_id: str | None) -> None:
        """Remove one breakpoint, or all. Raises `NotFound`, and `NotDurable` if it would be back after a restart."""
        if breakpoint_id is not None and breakpoint_id not in session.breakpoints:
            raise NotFound(f"no breakpoint {breakpoint_id[:100]}", param="breakpoint_id")
        going = list(session.breakpoints) if breakpoint_id is None else [breakpoint_id]
        await self._executor.call(lambda ticket: Disarm(ticket, session.id, breakpoint_id))
        for each in going:
            session.breakpoints.pop(each, None)
        self._changed(session)
        await self._keeper.settled(session)

    async def captures(self, session: Session, point: Point | None = None, layer: int | None = None) -> Captures:
        """What `capture` breakpoints have recorded, at one point or in one layer if that is given."""
        read: Callable[[], Captures] = await self._executor.call(
            lambda ticket: ReadCaptures(ticket, session.id, point, layer)
        )
        return await asyncio.to_thread(read)

    async def pool_captures(self, session: Session, *, normed: bool) -> TensorData:
        """The mean of what has been recorded, float32 `[hidden_size]`, with `normed` after the final norm of each
        position. Raises `ActivationsFull` if some of it found no room.
        """
        read: Callable[[], TensorData] = await self._executor.call(
            lambda ticket: PoolCaptures(ticket, session.id, normed)
        )
        return await asyncio.to_thread(read)

    async def read_kept(self, session: Session, point: Point, layer: int, positions: Positions) -> Activation:
        """What the session keeps of that point, captured or paused at. Raises `FieldOutOfRange` for positions that are
        not kept, or have others between them.
        """
        read: Callable[[], Activation] = await self._executor.call(
            lambda ticket: ReadKept(ticket, session.id, point, layer, positions)
        )
        return await asyncio.to_thread(read)

    async def clear_captures(self, session: Session) -> None:
        """Forget what has been recorded."""
        await self._executor.call(lambda ticket: ClearCaptures(ticket, session.id))

    def _changed(self, session: Session) -> None:
        """Tell the journal and the watchers what is armed now."""
        self._keeper.note(session)
        session.watcher.armed(session)

    async def read_checkpoint(self, session: Session, positions: Positions) -> Activation:
        """The checkpoint's residual stream. Raises `FieldOutOfRange` for positions that are not in it."""
        session.require_pause(to="read the checkpoint")
        found: Activation = await self._executor.call(lambda ticket: ReadCheckpoint(ticket, session.id, positions))
        return found

    async def edit_checkpoint(self, session: Session, edits: tuple[Edit, ...]) -> None:
        """Change the checkpoint, by all of `edits` or none. Raises `FieldOutOfRange`, and `DiskShort`."""
        place = session.require_pause(to="edit the checkpoint").info
        with self._room(session, vector_bytes(edits)):
            await self._executor.call(lambda ticket: EditCheckpoint(ticket, session.id, edits))
        session.watcher.edited(session, place)

    async def write_checkpoint(self, session: Session, tensor: TensorData) -> None:
        """Put `tensor` in the place of the checkpoint's residual stream. Raises `FieldOutOfRange`, and `DiskShort`."""
        place = session.require_pause(to="write the checkpoint").info
        with self._room(session, len(tensor.data)):
            await self._executor.call(lambda ticket: WriteCheckpoint(ticket, session.id, tensor))
        session.watcher.edited(session, place)

    async def lens(self, session: Session, positions: Positions, top_k: int) -> LensRows:
        """The `top_k` tokens that the final norm and the head make of the checkpoint.

        Raises `FieldOutOfRange` for positions that are not in it, and for more than `MAX_LENS_POSITIONS`.
        """
        info = session.require_pause(to="read the checkpoint").info
        end = info.end if positions.end is None else min(info.end, positions.end)
        count = 1 if positions.last else end - max(info.first, positions.first)
        if count > MAX_LENS_POSITIONS:
            raise FieldOutOfRange(
                f"positions: the lens takes 1 to {MAX_LENS_POSITIONS} of the checkpoint's {info.first}:{info.end} at "
                f"once, not {count}",
                param="positions",
            )
        make = partial(Lens, session=session.id, positions=positions, top_k=top_k)
        async with self._looking[session.owner, "checkpoint"]:
            found: LensRows = await self._executor.call(make)
        return found

    def _room(self, session: Session, count: int) -> AbstractContextManager[None]:
        """Room in the journal for bytes that the turn has changed with."""
        return nullcontext() if session.ephemeral else self._keeper.room.keeping(session.id, count)

    async def lens_map(
        self,
        session: Session,
        positions: Positions,
        layers: tuple[int, ...] | None,
        ask: LensAsk,
        beside: Session | None = None,
    ) -> tuple[ActivationMap, LensRows]:
        """A map after the layers given (None: all), and what a lens tells of each of its residual streams, and how that
        differs from the same of a session `beside` it. The caller may be cancelled at any moment.

        Each tenant has one map at a time.

        Raises `FieldOutOfRange` for positions that are not in the history, and for too many.
        """
        async with self._map(session, positions, layers, beside=beside) as found:
            return found, await self._executor.call(partial(MapLens, session=session.id, ask=ask))

    async def norms(
        self, session: Session, positions: Positions, layers: tuple[int, ...] | None, vector: TensorData | None
    ) -> ActivationNorms:
        """How long each of the same residual streams is, and its cosine to `vector`. Raises `FieldOutOfRange`."""
        async with self._looking[session.owner, "norms"]:
            measure: Callable[[], ActivationNorms] = await self._executor.call(
                lambda ticket: ReadNorms(ticket, session.id, positions, layers, vector)
            )
            return await asyncio.to_thread(measure)

    async def features(
        self, session: Session, positions: Positions, dictionary: Dictionary, top_k: int, chosen: tuple[int, ...]
    ) -> tuple[ActivationMap, FeatureRows]:
        """A map at the dictionary's layer and point, and what the dictionary makes of it: the `top_k` features of each
        stream, and the activations of `chosen` ones. Raises `FieldOutOfRange`,
        `NotFound`.
        """
        file, layers = dictionary.file, (dictionary.layer,)
        ask = partial(ReadFeatures, session=session.id, digest=file.digest, k=dictionary.k, top_k=top_k, chosen=chosen)
        async with self._map(session, positions, layers, dictionary.point) as found:
            return found, await self._executor.call(ask)

    async def attribution(
        self, session: Session, positions: Positions, tokens: tuple[int, int], neurons: int
    ) -> Attribution:
        """What is kept at a position as parts of the difference of two tokens' logits. Raises `FieldOutOfRange`."""
        make = partial(Attribute, session=session.id, positions=positions, tokens=tokens, neurons=neurons)
        async with self._look(session):
            found: Attribution = await self._executor.call(make)
        return found

    @asynccontextmanager
    async def _look(self, session: Session) -> AsyncIterator[None]:
        """The block is the tenant's turn to look. The engine then lets go of the session's map, which ends its look."""
        async with self._looking[session.owner, "map"]:
            try:
                yield
            finally:
                if session.state is not SessionState.CLOSED and self._executor.failure is None:
                    self._executor.post(lambda ticket: CloseMap(ticket, session.id))

    @asynccontextmanager
    async def _map(
        self,
        session: Session,
        positions: Positions,
        layers: tuple[int, ...] | None,
        point: Point = Point.RESID_POST,
        beside: Session | None = None,
    ) -> AsyncIterator[ActivationMap]:
        """A map that the engine holds on to for the block. Each tenant has one at a time."""
        other = None if beside is None else beside.id
        async with self._look(session):
            yield await self._executor.call(lambda ticket: OpenMap(ticket, session.id, positions, layers, point, other))
