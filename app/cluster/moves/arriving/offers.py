"""Whether a session that another server offers may come here."""

from __future__ import annotations

from collections.abc import Mapping

from app.cluster.moves.arriving.arrival import Arrival
from app.cluster.moves.wire import FORMAT, Model, Offer
from app.domain.errors import Moving, PeerFull, PeerMismatch, WrongState
from app.domain.values import Residency
from app.sessions.registry import SessionRegistry
from app.tenants.tenant import Directory

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
