"""A session that has come from another server: read, checked, and opened when it may be."""

from __future__ import annotations

from array import array
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from app.cluster.moves.bindings import Brought
from app.cluster.moves.wire import Offer
from app.domain.breakpoints import Intervention
from app.domain.errors import JournalUnavailable, NotDurable
from app.domain.values import Phase
from app.exports.checks import LabelChecks
from app.exports.label import ExportLabel, check_text
from app.journal.records import Steering
from app.messages import PublishKV, Reinstate, SetPhase
from app.sessions.keeper import session_of
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session


@dataclass(frozen=True, slots=True)
class Opening:
    """One such session, which requests cannot find yet."""

    offer: Offer
    session: Session
    label: ExportLabel
    brought: Brought

    @classmethod
    def of(cls, registry: SessionRegistry, offer: Offer) -> Opening:
        """That of an offer. Raises `ValueError` and `FieldOutOfRange` for one that no server makes. Takes long."""
        history = array("I", offer.history)
        check_text(offer.label.encode(), len(history))
        label = ExportLabel.from_json(offer.label)
        LabelChecks(registry.executor.engine.info, history, part_tokens=registry.part_tokens).check(label)
        session = session_of(offer.record, history, Steering(label.breakpoints, label.interventions))
        session.uncounted, session.returns_at = offer.uncounted, offer.returns_at
        return cls(offer, session, label, Brought(session, offer.binding))

    @property
    def computed_with(self) -> tuple[Intervention, ...]:
        """The edits that its KV has."""
        return self.label.interventions if self.label.turn is None else self.label.turn.interventions

    async def open(self, registry: SessionRegistry) -> None:
        """Give the session, which the engine has, all that it had; when this returns it is durable.

        Raises what that raises; then the journal knows nothing of it. Raises `NotDurable` if it may.
        """
        async with AsyncExitStack() as cleanup:
            await self._furnish(registry, cleanup)
            await self._keep(registry)

    def go_on(self, registry: SessionRegistry) -> None:
        """Go on where it stood, as it is found now. Others of its tenant may share its KV."""
        if registry.executor.failure is None:
            registry.executor.post(partial(PublishKV, session=self.session.id))
        if self.offer.pause_expires_at is not None:
            registry.pauses.go_on(self.session, self.offer.pause_expires_at)

    async def _furnish(self, registry: SessionRegistry, cleanup: AsyncExitStack) -> None:
        """Give it what it has beside its KV."""
        session, label, offer = self.session, self.label, self.offer
        if label.turn is not None:
            place = label.turn.to_place(session.history, before=array("I", offer.before or b""))
            cached, again = offer.cached_tokens, offer.tokens_recomputed
            turn = replace(label.turn.to_turn(), cached_tokens=cached, tokens_recomputed=again)
            copies = registry.paused_copies
            charge = copies.reserve(session, place, cleanup, sent=place.left_of_prompt)
            await copies.reinstate(session, turn, place, charge)
        elif label.breakpoints or label.interventions:
            await registry.executor.call(
                lambda ticket: Reinstate(ticket, session.id, label.breakpoints, label.interventions)
            )
        if session.phase is not Phase.COMPUTE:
            registry.executor.post(partial(SetPhase, session=session.id, phase=session.phase))

    async def _keep(self, registry: SessionRegistry) -> None:
        """Write down that it is here. Raises `JournalUnavailable`; then that will never be found."""
        offer, session, keeper = self.offer, self.session, registry.keeper
        before = keeper.homes.of(session.id)
        home = keeper.homes.arrive(session.id, session.owner, offer.source, offer.epoch, session.called)
        keeper.note(session, home, self.brought.records, self.brought.keyed)
        try:
            await keeper.settled(session)
        except NotDurable as error:
            keeper.homes.undo(session.id, before)
            keeper.depart(session, before)
            await keeper.settled(session)
            raise JournalUnavailable(f"no session was opened: {error.reason}") from error
