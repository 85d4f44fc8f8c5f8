"""One session on its way from another server: whether it may come, what is known of it, and how it is opened."""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from app.cluster.key import new_nonce
from app.cluster.moves.bindings import Brought
from app.cluster.moves.calls import give
from app.cluster.moves.wire import FORMAT, Answer, Model, Offer
from app.domain.breakpoints import Intervention
from app.domain.errors import JournalUnavailable, Moving, NotDurable, PeerFull, PeerMismatch, WrongState
from app.domain.values import Phase, Residency, SessionId
from app.engine_process.executor import EngineExecutor
from app.exports.checks import read_snapshot
from app.exports.snapshot import SessionSnapshot
from app.journal.records import Steering
from app.messages import PublishKV, ReceiveKV, SetPhase
from app.sessions.keeper import session_of
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.tenants.tenant import Directory


@dataclass(frozen=True, slots=True)
class Opening:
    """One such session, which requests cannot find yet."""

    offer: Offer
    session: Session
    snapshot: SessionSnapshot
    brought: Brought

    @classmethod
    def of(cls, registry: SessionRegistry, offer: Offer) -> Opening:
        """That of an offer. Raises `ValueError` and `FieldOutOfRange` for one that no server makes. Takes long."""
        history = array("I", offer.history)
        snapshot = read_snapshot(registry, offer.label.encode(), history)
        session = session_of(offer.record, history, Steering(snapshot.breakpoints, snapshot.interventions))
        session.uncounted, session.returns_at = offer.uncounted, offer.returns_at
        return cls(offer, session, snapshot, Brought(session, offer.binding))

    @property
    def computed_with(self) -> tuple[Intervention, ...]:
        """The edits that its KV has."""
        return self.snapshot.interventions if self.snapshot.turn is None else self.snapshot.turn.interventions

    async def open(self, registry: SessionRegistry) -> None:
        """Give the session, which the engine has, all that it had; when this returns it is durable.

        Raises what that raises; then the journal knows nothing of it. Raises `NotDurable` if it may.
        """
        await self._furnish(registry)
        await self._keep(registry)

    def go_on(self, registry: SessionRegistry) -> None:
        """Go on where it stood, as it is found now. Others of its tenant may share its KV."""
        if registry.executor.failure is None:
            registry.executor.post(partial(PublishKV, session=self.session.id))
        if self.offer.pause_expires_at is not None:
            registry.pauses.go_on(self.session, self.offer.pause_expires_at)

    async def _furnish(self, registry: SessionRegistry) -> None:
        """Give it what it has beside its KV."""
        session, snapshot, offer = self.session, self.snapshot, self.offer
        if snapshot.turn is None:
            await registry.turns.furnish(session, None, None)
        else:
            place = snapshot.turn.to_place(session.history, before=array("I", offer.before or b""))
            cached, again = offer.cached_tokens, offer.tokens_recomputed
            turn = replace(snapshot.turn.to_turn(), cached_tokens=cached, tokens_recomputed=again)
            await registry.turns.furnish(session, turn, place, sent=place.left_of_prompt)
        if session.phase is not Phase.COMPUTE:
            registry.executor.post(partial(SetPhase, session=session.id, phase=session.phase))

    async def _keep(self, registry: SessionRegistry) -> None:
        """Write down that it is here. Raises `JournalUnavailable`; then that will never be found."""
        offer, session, keeper = self.offer, self.session, registry.keeper
        before = keeper.homes.of(session.id)
        home = keeper.homes.arrive(session.id, session.owner, offer.source, offer.epoch, session.bound_as)
        keeper.note(session, home, self.brought.records, self.brought.keyed)
        try:
            await keeper.settled(session)
        except NotDurable as error:
            keeper.homes.undo(session.id, before)
            keeper.depart(session, before)
            await keeper.settled(session)
            raise JournalUnavailable(f"no session was opened: {error.reason}") from error


class GivenUp(Exception):
    """The session does not come."""


@dataclass(slots=True, eq=False)
class Arrival:
    """One session on its way here."""

    offer: Offer
    opening: Opening
    received: asyncio.Task[None] | None = None
    """Ends when the engine has the session, or has not got it."""
    committing: asyncio.Task[Answer] | None = None
    """Set once the old home has said that the session may be taken."""
    losses: int = 0
    """Of engines, when one was told to receive the session."""
    word: str = field(default_factory=new_nonce)
    """What only the old home has heard: who repeats its messages later has not."""
    timer: asyncio.TimerHandle | None = None
    place: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Its place among the sessions that may be open, while it is on its way."""

    async def leave(self, error: BaseException) -> None:
        """Give up its place."""
        if self.timer is not None:
            self.timer.cancel()
        await self.place.__aexit__(type(error), error, None)

    @property
    def session(self) -> SessionId:
        """Its id."""
        return self.offer.record.id

    @property
    def has_failed(self) -> bool:
        """Whether it has not come, and never will."""
        task = self.received
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    async def receive(self, executor: EngineExecutor, connection: socket.socket) -> None:
        """Return when the engine has received the session over the connection. Raises why it has not."""
        number = give(executor, connection)
        self.losses = executor.losses
        await executor.call(
            lambda ticket: ReceiveKV(
                ticket,
                self.session,
                number,
                self.offer.record.owner or "",
                self.offer.record.residency,
                tuple(array("I", self.offer.history)),
                self.opening.computed_with,
                self.offer.record.namespace,
                self.offer.record.adapter_digest or "",
            )
        )

    async def came(self) -> None:
        """Return when the engine has the session. Raises why it has not."""
        assert self.received is not None
        await asyncio.shield(self.received)


AT_ONCE = 8
"""Sessions that may be on their way here."""


def require_same_model(offer: Offer, registry: SessionRegistry) -> None:
    """Raise `PeerMismatch` if the other server runs another model, or one with an adapter that is not here, or moves
    sessions in another way.
    """
    if offer.format != FORMAT:
        raise PeerMismatch(f"the session is in format {offer.format} of moves, this server reads {FORMAT}")
    here = Model.of(registry.executor.engine.info)
    if offer.model != here:
        raise PeerMismatch(f"the session is of the model {offer.model}, this server runs {here}")
    adapter, digest = offer.record.adapter, offer.record.adapter_digest
    if digest is not None and registry.adapters.by_digest(digest) is None:
        raise PeerMismatch(f"the session's LoRA adapter, {adapter!r} ({digest[:12]}), is not loaded there")


def require_tenant(offer: Offer, registry: SessionRegistry, directory: Directory) -> None:
    """Raise `PeerMismatch` if the session's owner is unknown here, and what `SessionTable.require_guarantee` raises."""
    owner = offer.record.owner
    if owner is None if directory else owner is not None:
        raise PeerMismatch("one of the two servers has tenants, and the other has none")
    if owner is not None and directory.named(owner) is None:
        raise PeerMismatch(f"there is no tenant {owner} here")
    if offer.record.residency is Residency.GUARANTEED:
        registry.table.require_guarantee(owner)


def require_absent(offer: Offer, registry: SessionRegistry, coming: Mapping[str, Arrival]) -> None:
    """Raise `Moving` or `WrongState` if the session is here, has been or is coming, `PeerFull` if too many come.
    `coming` are those on their way, by the tokens of their offers.
    """
    session, homes = offer.record.id, registry.keeper.homes
    found = registry.table.find(session)
    if found is not None and found.leaving:
        raise Moving(f"session {session} has left here, but it is not known yet where it is: try again")
    if found is not None:
        raise WrongState(f"session {session} is here already")
    if homes.epoch(session) >= offer.epoch:
        raise WrongState(f"session {session} has been moved since: {homes.epoch(session)} times")
    if any(each.session == session for each in coming.values()) or offer.token in coming:
        raise WrongState(f"session {session} is on its way here already")
    if len(coming) >= AT_ONCE:
        raise PeerFull(f"{AT_ONCE} sessions are on their way here")
    if registry.table.giving_way(offer.record.owner, 1):
        raise PeerFull("as many sessions are open as may be: others would have to close for good")
