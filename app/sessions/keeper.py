"""Keeps the journal up with the sessions: what of each is journaled, and how it comes back."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import msgspec

from app.domain.breakpoints import MAX_INTERVENTION_BYTES, Breakpoint, Edit
from app.domain.errors import DiskShort
from app.domain.homes import Home, Homes, HomeState
from app.domain.values import (
    NO_JOURNAL,
    Adapter,
    ForkPoint,
    JournalState,
    ModelInfo,
    SessionId,
    SessionState,
    common_prefix,
)
from app.journal.journal import COPIES, Journal
from app.journal.records import (
    NO_STEERING,
    Change,
    Departed,
    Identity,
    InterventionChange,
    KeyedRecord,
    ResponseKey,
    ResponseRecord,
    SessionRecord,
    Steering,
)
from app.journal.tables import load_homes, load_keyed, load_steering
from app.machine.budget import DiskFull, DiskRoom, Share
from app.sessions.keyed import KeyedRequests
from app.sessions.session import Session, SessionUsage

MOST = COPIES * MAX_INTERVENTION_BYTES
"""Bytes that one session's turn can bring to the journal."""


class JournalRoom:
    """Room beside the disk's reserve. Used on the event loop only."""

    def __init__(self, room: DiskRoom | None) -> None:
        """None: nothing is journaled."""
        self._room = room
        self._claims: dict[SessionId, Share] = {}
        """Of turns that are paused: the journal gets what they bring when they end."""

    @contextmanager
    def claiming(self, count: int) -> Iterator[None]:
        """Room for `count` bytes that are journaled in the block. Raises `DiskShort`."""
        if self._room is None:
            yield
            return
        claim = Share(self._room)
        _grow(claim, COPIES * count)
        try:
            yield
        finally:
            claim.shrink()

    @contextmanager
    def keeping(self, session: SessionId, count: int) -> Iterator[None]:
        """Room for `count` bytes that the session's turn brings when it ends, unless the block fails; what is cancelled
        may still be carried out. Raises `DiskShort`.
        """
        if self._room is None:
            yield
            return
        claim = self._claims.setdefault(session, Share(self._room))
        more = min(COPIES * count, MOST - claim.held)
        _grow(claim, more)
        try:
            yield
        except Exception:
            claim.give(more)
            raise

    def release(self, session: SessionId) -> None:
        """The session's turn has ended, or the session is gone."""
        claim = self._claims.pop(session, None)
        if claim is not None:
            claim.shrink()


def vector_bytes(edits: Iterable[Edit | Breakpoint]) -> int:
    """Bytes of the tensors of edits or breakpoints, which may share them."""
    return sum({id(each.data): len(each.data) for edit in edits for each in edit.tensors}.values())


def _grow(claim: Share, count: int) -> None:
    try:
        claim.grow(count)
    except DiskFull as error:
        raise DiskShort(f"nothing was done: {error.strerror}") from error


NOTHING = array("I")


class SessionKeeper:
    """Journals sessions, except ephemeral ones. Without a journal it does nothing.

    Used on the event loop only.
    """

    def __init__(self, journal: Journal | None, room: DiskRoom | None = None) -> None:
        """`room` is that on the journal's disk."""
        self._journal = journal
        self.room = JournalRoom(room if journal is not None else None)
        self._journaled: dict[SessionId, tuple[array[int], int]] = {}
        """The array that each session's history was noted from and how much of it the journal has, so that only the
        difference is written. It is the session's own: between two notes it may be cut, or lengthened, but not both.
        """
        self._steering: dict[SessionId, Steering] = {}
        """Each session's steering as the journal has it, if it has any."""
        self.homes = Homes()
        """Of sessions that have moved between servers."""
        self.identity: Identity | None = None
        """Which journal it is, once it is loaded; None: nothing is journaled."""
        self.keyed = KeyedRequests()
        """Requests with an `Idempotency-Key`."""

    def load(self, model: ModelInfo, keys: Mapping[str, str] = MappingProxyType({})) -> list[Session]:
        """The sessions in the journal, all idle, oldest first. `keys` and errors are those of `JournalStore.load`."""
        found = [] if self._journal is None else self._journal.store.load(model, keys)
        self._journaled = {record.id: (history, len(history)) for record, history in found}
        if self._journal is not None:
            self._steering = self._journal.store.read(load_steering)
            self.identity = self._journal.identity
            self.homes = self._journal.store.read(load_homes)
            self.keyed = KeyedRequests(self._journal.store.read(load_keyed))
        sessions = [
            session_of(record, history, self._steering.get(record.id, NO_STEERING)) for record, history in found
        ]
        for session in sessions:
            home = self.homes.of(session.id)
            session.leaving = home is not None and home.state is HomeState.LEAVING
        return sessions

    def note(
        self,
        session: Session,
        home: Home | None = None,
        responses: Sequence[ResponseRecord] = (),
        keyed: Iterable[KeyedRecord] = (),
    ) -> None:
        """Journal the session as it is now, without waiting, its `home` if it moves, and the `responses` that it has
        brought from its last one. The history is read only as far as it may have changed. `keyed` are the requests
        that have changed it.

        Of a turn that is in it, nothing is journaled before it is over; what has been closed stays forgotten.
        """
        if self._journal is None or session.ephemeral or session.state is SessionState.CLOSED:
            return
        if not session.busy:
            self.room.release(session.id)
        history = session.settled_history
        noted, length = self._journaled.get(session.id, (NOTHING, 0))
        position = min(length, len(history) if noted is history else common_prefix(noted, history))
        token_ids = history[position:].tobytes()
        steering = self._changed_steering(session)
        change = Change(record_of(session), position, token_ids, *steering, home, tuple(responses), tuple(keyed))
        self._journal.append(session.id, change)
        self._journaled[session.id] = history, len(history)

    def forget(self, session: Session) -> None:
        """Journal that the session is gone, without waiting."""
        self.room.release(session.id)
        if not session.ephemeral:
            self.keyed.forget_session(session.id)
        if self._journal is not None and not session.ephemeral:
            self._journal.append(session.id, None)
            self._let_go(session.id)
            self.homes.close(session.id)

    def depart(self, session: Session, home: Home | None, responses: Iterable[str] = ()) -> None:
        """Journal that the session is at home elsewhere, without waiting, and these responses with it. None: it has
        never moved.
        """
        self.room.release(session.id)
        self.keyed.forget_session(session.id)
        if self._journal is not None:
            gone = tuple(responses)
            self._journal.append(session.id, Departed(home, gone))
            for response in gone:  # what waits of it would be written after that
                self._journal.append(ResponseKey(response), None)
            self._let_go(session.id)

    async def settled(self, session: Session) -> None:
        """Return when all that was noted of the session is durable. Raises `NotDurable` if it could not be written."""
        if not session.ephemeral:
            await self.settled_id(session.id)

    async def settled_id(self, session: SessionId, responses: Iterable[str] = ()) -> None:
        """`settled` of a session that may be here no more, or not yet, and of responses."""
        if self._journal is not None:
            await self._journal.settled(session, *map(ResponseKey, responses))

    @property
    def is_durable(self) -> bool:
        """Whether sessions come back after a restart."""
        return self._journal is not None

    @property
    def state(self) -> JournalState:
        """What is to be told of the journal."""
        return NO_JOURNAL if self._journal is None else self._journal.state

    def _let_go(self, session: SessionId) -> None:
        self._journaled.pop(session, None)
        self._steering.pop(session, None)

    def _changed_steering(self, session: Session) -> tuple[tuple[Breakpoint, ...] | None, InterventionChange | None]:
        """The session's breakpoints, and its interventions as far as they differ; None: the journal has them."""
        had = self._steering.get(session.id, NO_STEERING)
        armed, made = tuple(session.breakpoints.values()), session.settled_interventions
        changed = InterventionChange.between(had.interventions, made)
        if armed == had.breakpoints and changed is None:
            return None, None
        self._steering[session.id] = Steering(armed, made)
        return None if armed == had.breakpoints else armed, changed


def record_of(session: Session) -> SessionRecord:
    """The session without its history and its steering."""
    origin = session.forked_from
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
        usage=msgspec.json.encode(session.usage).decode(),
        forked_from=None if origin is None else origin.session,
        forked_tokens=None if origin is None else origin.tokens,
        namespace=session.namespace,
        adapter=None if session.adapter is None else session.adapter.name,
        adapter_digest=None if session.adapter is None else session.adapter.digest,
    )


def session_of(record: SessionRecord, history: array[int], steering: Steering) -> Session:
    """The session again, idle."""
    usage = msgspec.json.decode(record.usage, type=SessionUsage)
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
        forked_from=None
        if record.forked_from is None or record.forked_tokens is None
        else ForkPoint(record.forked_from, record.forked_tokens),
        namespace=record.namespace,
        adapter=None
        if record.adapter is None or record.adapter_digest is None
        else Adapter(record.adapter, record.adapter_digest),
        usage=usage,
        prompt_tokens=next((start for start in usage.answers[-1:] if start < len(history)), 0),
        history=history,
        breakpoints={each.id: each for each in steering.breakpoints},
        interventions=steering.interventions,
    )
