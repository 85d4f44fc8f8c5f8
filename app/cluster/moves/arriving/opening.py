"""A session that has come from another server: read, checked, and opened when it may be."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from functools import partial

from app.cluster.moves.bindings import Brought
from app.cluster.moves.wire import Offer
from app.domain.breakpoints import Intervention
from app.domain.errors import JournalUnavailable, NotDurable
from app.domain.values import Phase
from app.exports.checks import read_snapshot
from app.exports.snapshot import SessionSnapshot
from app.journal.records import Steering
from app.messages import PublishKV, SetPhase
from app.sessions.keeper import session_of
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session


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
