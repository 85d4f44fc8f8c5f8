"""The checkpoint of a paused turn is read and changed."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from app.bridge.executor import EngineExecutor
from app.domain.activations import Activation, CheckpointInfo, CheckpointLens, LensPosition
from app.domain.breakpoints import Edit, Positions, TensorData
from app.domain.errors import FieldOutOfRange
from app.messages import EditCheckpoint, Lens, ReadCheckpoint, WriteCheckpoint
from app.sessions.guards.journal_room import vector_bytes
from app.sessions.keeper import SessionKeeper
from app.sessions.session import Session
from app.sessions.whitebox.head_time import HeadTime

MAX_LENS_POSITIONS = 64
"""In one call: all turns wait while the head is applied to them."""


class Checkpoints:
    """The checkpoints of all sessions. Used on the event loop only.

    Every method raises `WrongState` unless the session is paused.
    """

    def __init__(self, executor: EngineExecutor, head: HeadTime, keeper: SessionKeeper) -> None:
        self._executor = executor
        self._keeper = keeper
        self._head = head

    async def read(self, session: Session, positions: Positions) -> Activation:
        """The checkpoint's residual stream. Raises `FieldOutOfRange` for positions that are not in it."""
        session.require_pause(to="read the checkpoint")
        found: Activation = await self._executor.call(lambda ticket: ReadCheckpoint(ticket, session.id, positions))
        return found

    async def edit(self, session: Session, edits: tuple[Edit, ...]) -> None:
        """Change the checkpoint, by all of `edits` or none. Raises `FieldOutOfRange`, and `DiskShort`."""
        layer = session.require_pause(to="edit the checkpoint").info.layer
        with self._room(session, vector_bytes(edits)):
            await self._executor.call(lambda ticket: EditCheckpoint(ticket, session.id, edits))
        session.watcher.edited(session, layer)

    async def write(self, session: Session, tensor: TensorData) -> None:
        """Put `tensor` in the place of the checkpoint's residual stream. Raises `FieldOutOfRange`, and `DiskShort`."""
        layer = session.require_pause(to="write the checkpoint").info.layer
        with self._room(session, len(tensor.data)):
            await self._executor.call(lambda ticket: WriteCheckpoint(ticket, session.id, tensor))
        session.watcher.edited(session, layer)

    async def lens(self, session: Session, positions: Positions, top_k: int) -> tuple[LensPosition, ...]:
        """The `top_k` tokens that the final norm and the head make of the checkpoint.

        Raises `FieldOutOfRange` for positions that are not in it, and for more than `MAX_LENS_POSITIONS`.
        """
        _check_lens(session.require_pause(to="read the checkpoint").info, positions)
        make = partial(Lens, session=session.id, positions=positions, top_k=top_k)
        return (await self._head.take(session.owner, make, CheckpointLens)).positions

    def _room(self, session: Session, count: int) -> AbstractContextManager[None]:
        """Room in the journal for bytes that the turn has changed with."""
        return nullcontext() if session.ephemeral else self._keeper.room.keeping(session.id, count)


def _check_lens(info: CheckpointInfo, positions: Positions) -> None:
    """Raise `FieldOutOfRange` if `positions` are too many of the checkpoint's."""
    end = info.end if positions.end is None else min(info.end, positions.end)
    count = 1 if positions.last else end - max(info.first, positions.first)
    if count > MAX_LENS_POSITIONS:
        raise FieldOutOfRange(
            f"positions: the lens takes 1 to {MAX_LENS_POSITIONS} of the checkpoint's {info.first}:{info.end} at once, "
            f"not {count}",
            param="positions",
        )
