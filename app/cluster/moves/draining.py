"""A server that shuts down hands its sessions to others first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from app.cluster.fleet import Fleet
from app.cluster.moves.departures import Departures
from app.domain.errors import (
    DjinnError,
    MoveUnsettled,
    NameTaken,
    PeerAway,
    PeerFull,
    PeerMismatch,
    PeerStranger,
    WrongState,
)
from app.domain.homes import MoveReason
from app.domain.values import SessionId, SessionState
from app.sessions.lifecycle import worth
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session

logger = logging.getLogger(__name__)

MOST_REFUSALS = 8
"""Sessions that a peer may refuse, one after the other, before nothing more is offered to it."""
PATIENCE_S = 0.2
"""How long a peer is offered nothing after a refusal: what it is receiving now may fill it, or end."""
TRIES = 2
"""How often one session is offered to one peer."""
AT_ONCE = 4
"""Sessions that are under way at the same time."""
LOOK_S = 0.02
"""Between two looks at what can leave, while nothing ends."""
FAREWELL_S = 2.5
"""How long the server still answers when its sessions have left: until all others have heard that, and ask it no more.
"""
ALONE_S = 2.5
"""How long it waits for a peer that takes anything: servers that all end at once need not wait for each other."""
DISTURBED_S, MOST_DISTURBED = 0.5, 4
"""After how many seconds, and how often, a session is tried again that was in no state to move."""
AWAY_S = 1.0
"""How long nothing is offered to a peer that has not answered."""
ORDER_S = 1.0
"""How long the order of sessions is kept: turns that end, and phases that clients signal, change it."""
PROGRESS_S = 5.0
"""Between two lines in the log."""


@dataclass(slots=True)
class Tried:
    """What has become of one session's offers."""

    refused_by: Counter[str] = field(default_factory=Counter)
    """Offers, by the peer that has refused them."""
    not_before: float = 0.0
    """When it may be tried again."""
    disturbed: int = 0
    """How often the session was in no state to move."""


class Draining:
    """Hands the sessions of a server that shuts down to its peers. Used on the event loop only."""

    def __init__(self, registry: SessionRegistry, departures: Departures, fleet: Fleet) -> None:
        self.is_over = False
        """Whether all sessions have left, so that this server needs no more requests."""
        self._registry = registry
        self._departures = departures
        self._fleet = fleet
        self._in_a_row = Counter[str]()
        """How often each peer has refused since it last took a session."""
        self._not_before: dict[str, float] = {}
        self._wanted: dict[SessionId, None] = {}
        """Those that requests have asked for: they leave first."""
        self._tried: dict[SessionId, Tried] = {}
        self._stay: set[SessionId] = set()
        self._under_way: dict[asyncio.Task[None], Session] = {}
        self._left = Counter[str]()
        self._order: list[Session] = []
        self._ordered_at = -ORDER_S

    async def run(self, within_s: float) -> None:
        """Hand over all that can leave within that time, each when its turn is over. What remains stays as it is."""
        deadline = time.monotonic() + within_s - FAREWELL_S
        if self._registry.executor.failure is not None or deadline <= time.monotonic():
            return
        self._registry.table.evacuates = self._evacuates
        try:
            names = ", ".join(each.name for each in self._fleet.ready) or "none"
            count = len(list(self._registry.table))
            logger.info("drain: sessions here: %d; servers that may take them: %s", count, names)
            await self._hand_over(deadline)
            has_peers = bool(self._fleet.ready)
        finally:
            self._registry.table.evacuates = lambda session: False
        self._log("drain: sessions have left: %s; that stay here: %d")
        self.is_over = all(each.ephemeral for each in self._registry.table)
        if has_peers or self._left:
            await asyncio.sleep(FAREWELL_S)

    async def _hand_over(self, deadline: float) -> None:
        told_at = alone_since = time.monotonic()
        while (now := time.monotonic()) < deadline and self._registry.executor.failure is None:
            ready = self._fleet.ready
            are_full = bool(ready) and all(self._in_a_row[each.name] >= MOST_REFUSALS for each in ready)
            any_to_go = any(self._can_leave(each) for each in self._registry.table)
            if not any_to_go or (are_full and not self._under_way):
                break
            alone_since = now if ready or self._under_way else alone_since
            if now - alone_since > ALONE_S:
                logger.warning("drain: no server takes sessions any more")
                break
            self._start_some(now)
            if now - told_at >= PROGRESS_S:
                told_at = now
                self._log("drain: sessions have left: %s; still here: %d")
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(LOOK_S)
        if self._under_way:  # each ends by itself: what cannot be sent in time fails, and stays
            await asyncio.wait(self._under_way, timeout=max(0.0, deadline - time.monotonic()))

    def _start_some(self, now: float) -> None:
        while len(self._under_way) < AT_ONCE and (found := self._next(now)) is not None:
            session, peer = found
            task = asyncio.create_task(self._give(session, peer))
            self._under_way[task] = session
            task.add_done_callback(self._under_way.pop)

    def _next(self, now: float) -> tuple[Session, str] | None:
        """The session that is to leave next, and where to."""
        ready = self._fleet.ready
        peers = [each for each in ready if self._in_a_row[each.name] < MOST_REFUSALS]
        peers = [each for each in peers if self._not_before.get(each.name, 0.0) <= now]
        for session in self._in_order(now) if peers else ():
            tried = self._tried.setdefault(session.id, Tried())
            peer = next((each for each in peers if tried.refused_by[each.name] < TRIES), None)
            if peer is not None and tried.not_before <= now:
                peer.placed += 1
                return session, peer.name
            if all(tried.refused_by[each.name] >= TRIES for each in ready):
                self._stay.add(session.id)
        return None

    def _in_order(self, now: float) -> Iterator[Session]:
        """Those that may go now: first those that requests wait for, then those whose return is next."""
        if now - self._ordered_at >= ORDER_S:
            self._ordered_at, at = now, time.time()
            self._order = sorted(self._registry.table, key=lambda each: worth(each, at))
        going = {each.id for each in self._under_way.values()}
        wanted = [found for each in self._wanted if (found := self._registry.table.find(each)) is not None]
        for session in chain(wanted, self._order):
            is_busy = session.under_way or session.requests or session.leaving or session.state is SessionState.CLOSED
            if not is_busy and session.id not in going and self._can_leave(session):
                yield session

    async def _give(self, session: Session, peer: str) -> None:
        tried = self._tried[session.id]
        try:
            await self._departures.move(session, peer, MoveReason.DRAIN)
        except (PeerFull, PeerAway, MoveUnsettled) as error:
            tried.refused_by[peer] += 1
            self._in_a_row[peer] += 1
            self._not_before[peer] = time.monotonic() + PATIENCE_S
            if not isinstance(error, PeerFull) and (replica := self._fleet.find(peer)) is not None:
                replica.shun(AWAY_S)
        except (PeerMismatch, PeerStranger, NameTaken) as error:
            logger.warning("drain: a session cannot go to %s: %s", peer, error.message, extra={"session": session.id})
            tried.refused_by[peer] = TRIES
        except WrongState:  # another request is under way, or it has something that cannot move
            tried.disturbed += 1
            tried.not_before = time.monotonic() + DISTURBED_S
            if tried.disturbed >= MOST_DISTURBED:
                self._stay.add(session.id)
        except DjinnError as error:
            logger.warning("drain: a session stays: %s", error.message, extra={"session": session.id})
            self._stay.add(session.id)
        else:
            self._in_a_row[peer] = 0
            self._left[peer] += 1
            self._tried.pop(session.id, None)
            self._wanted.pop(session.id, None)

    def _evacuates(self, session: Session) -> bool:
        if not self._can_leave(session):
            return False
        self._wanted[session.id] = None
        return True

    def _can_leave(self, session: Session) -> bool:
        """Whether the session leaves when its turn is over, as far as is known."""
        return session.id not in self._stay and not session.ephemeral

    def _log(self, text: str) -> None:
        left = ", ".join(f"{count} to {peer}" for peer, count in sorted(self._left.items())) or "none"
        logger.info(text, left, len([each for each in self._registry.table if not each.ephemeral]))
