"""Disk for vectors and activations of clients: they take none of what the journal needs for turns."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from app.domain.breakpoints import MAX_INTERVENTION_BYTES, Edit
from app.domain.errors import DiskShort
from app.domain.values import SessionId
from app.journal.attempts import COPIES
from app.machine.disk import Claim, DiskFull, DiskRoom

MOST = COPIES * MAX_INTERVENTION_BYTES
"""Bytes that one session's turn can bring to the journal."""


class JournalRoom:
    """Room beside the disk's reserve. Used on the event loop only."""

    def __init__(self, room: DiskRoom | None) -> None:
        """None: nothing is journaled."""
        self._room = room
        self._claims: dict[SessionId, Claim] = {}
        """Of turns that are paused: the journal gets what they bring when they end."""

    @contextmanager
    def claiming(self, count: int) -> Iterator[None]:
        """Room for `count` bytes that are journaled in the block. Raises `DiskShort`."""
        if self._room is None:
            yield
            return
        claim = Claim(self._room)
        _grow(claim, COPIES * count)
        try:
            yield
        finally:
            claim.wrote(claim.left)

    @contextmanager
    def keeping(self, session: SessionId, count: int) -> Iterator[None]:
        """Room for `count` bytes that the session's turn brings when it ends, unless the block fails; what is cancelled
        may still be carried out. Raises `DiskShort`.
        """
        if self._room is None:
            yield
            return
        claim = self._claims.setdefault(session, Claim(self._room))
        more = min(COPIES * count, MOST - claim.left)
        _grow(claim, more)
        try:
            yield
        except Exception:
            claim.wrote(more)
            raise

    def release(self, session: SessionId) -> None:
        """The session's turn has ended, or the session is gone."""
        claim = self._claims.pop(session, None)
        if claim is not None:
            claim.wrote(claim.left)


def vector_bytes(edits: Iterable[Edit]) -> int:
    """Bytes of the vectors of `edits`, which may share them."""
    return sum({id(edit.vector.data): len(edit.vector.data) for edit in edits if edit.vector is not None}.values())


def _grow(claim: Claim, count: int) -> None:
    try:
        claim.grow(count)
    except DiskFull as error:
        raise DiskShort(f"nothing was done: {error.strerror}") from error
