"""Keeps the journal up with the sessions: what of each is journaled, and how it comes back."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from dataclasses import asdict

from app.domain import ModelInfo, SessionId, SessionState
from app.journal.journal import Journal
from app.journal.records import Change, SessionRecord
from app.session import Session, SessionUsage

NOTHING = array("I")


class SessionKeeper:
    """Journals sessions, but not the ephemeral ones. Without a journal nothing is kept, and nobody waits.

    Used on the event loop only.
    """

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._journaled: dict[SessionId, array[int]] = {}
        """Each session's history as the journal has it, so that only the difference is written."""

    def load(self, model: ModelInfo) -> list[Session]:
        """The sessions in the journal, all idle, oldest first. Raises what `JournalStore.load` raises."""
        found = [] if self._journal is None else self._journal.load(model)
        self._journaled = {record.id: history[:] for record, history in found}
        return [_session(record, history) for record, history in found]

    def note(self, session: Session) -> None:
        """Journal the session as it is now, without waiting.

        Only an idle one: a turn is noted when it is over, and what has been closed stays forgotten.
        """
        if self._journal is None or session.ephemeral or session.state is not SessionState.IDLE:
            return
        position = common_prefix(self._journaled.get(session.id, NOTHING), session.history)
        self._journal.append(session.id, Change(_record(session), position, session.history[position:].tobytes()))
        self._journaled[session.id] = session.history[:]

    def forget(self, session: Session) -> None:
        """Journal that the session is gone, without waiting."""
        if self._journal is not None and not session.ephemeral:
            self._journal.append(session.id, None)
            self._journaled.pop(session.id, None)

    async def settled(self, session: Session) -> None:
        """Return when all that was noted of the session is durable. Raises `NotDurable` if it could not be written."""
        if self._journal is not None and not session.ephemeral:
            await self._journal.settled()


def common_prefix(a: array[int], b: array[int]) -> int:
    """How many items `a` and `b` begin with in common; nearly always all of one of them."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return bisect_left(range(shorter), True, key=lambda length: a[: length + 1] != b[: length + 1])


def _record(session: Session) -> SessionRecord:
    return SessionRecord(
        id=session.id,
        owner=session.owner,
        name=session.name,
        metadata=json.dumps(session.metadata),  # ASCII: a client's strings may have lone surrogates
        ttl_s=session.ttl_s,
        residency=session.residency,
        phase=session.phase,
        created_at=session.created_at,
        used_at=session.used_at,
        usage=json.dumps(asdict(session.usage)),
    )


def _session(record: SessionRecord, history: array[int]) -> Session:
    return Session(
        id=record.id,
        owner=record.owner,
        name=record.name,
        metadata=json.loads(record.metadata),
        ttl_s=record.ttl_s,
        residency=record.residency,
        phase=record.phase,
        created_at=record.created_at,
        used_at=record.used_at,
        usage=SessionUsage(**json.loads(record.usage)),
        history=history,
    )
