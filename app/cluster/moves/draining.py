"""Sessions leave a server that shuts down, and some leave one whose memory is nearly full."""

import asyncio
import logging
import math
import time
from collections import Counter

from app.cluster.claims import Load
from app.cluster.fleet import Fleet, Replica
from app.cluster.moves.departures import AT_ONCE, Departures
from app.domain.errors import (
    DjinnError,
    EngineAway,
    MoveUnsettled,
    NameTaken,
    PeerAway,
    PeerFull,
    PeerMismatch,
    PeerStranger,
    WrongState,
)
from app.domain.homes import MoveReason
from app.domain.values import Phase, Residency, SessionId, SessionState
from app.sessions.lifecycle import returns_in_s, worth
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session

logger = logging.getLogger(__name__)
MOST_REFUSALS, TRIES = 8, 2
"""Sessions that a peer may refuse in a row before it gets no more offers, and how often it is offered one."""
PATIENCE_S, AWAY_S = 0.2, 1.0
"""Seconds without an offer to a peer that refused one, which a move under way may fill, or that did not answer."""
DISTURBED_S, MOST_DISTURBED = 0.5, 4
"""After how many seconds, and how often, a session is tried again that was in no state to move."""
LOOK_S, ORDER_S, PROGRESS_S = 0.02, 1.0, 5.0
"""Between two looks at what can leave, two orderings of the sessions, and two lines in the log."""
FAREWELL_S = 2.5
"""How long the server still answers when its sessions have left: until all others have heard of it."""
ALONE_S = 2.5
"""How long it waits for a peer that takes anything: servers that all end at once need not wait for each other."""
BALANCE_S, AT_A_LOOK = 1.0, 2
"""Seconds between two looks at the memory, and how many sessions go between them, one after the other."""
FULL, EASED = 0.1, 0.2
"""Free parts of memory: with less than the first in both tiers sessions go, until there is the second in one."""
CLEARLY = 0.25
"""How much larger the free share of a peer's host memory must be, so that moves do not make it the fuller one."""
RESTS_S, STAYS_S, SHUNNED_S = 30.0, 600.0, 30.0
"""A session stays that returns sooner, or for so long after it came or failed to go; how long a peer is left out."""


class Draining:
    """Hands sessions to peers: all in a shutdown, resting ones while memory is nearly full. On the event loop only."""

    def __init__(self, registry: SessionRegistry, departures: Departures, fleet: Fleet) -> None:
        self.is_over = False
        """Whether all sessions have left, so that this server needs no more requests."""
        self._registry, self._departures, self._fleet = registry, departures, fleet
        self._refusals = Counter[str]()
        """How often each peer has refused since it last took a session."""
        self._tries = Counter[tuple[SessionId, str]]()
        """How often a peer has refused a session; without a peer, how often the session was in no state to move."""
        self._not_before: dict[str, float] = {}
        """When a peer or a session may be tried again. A session that stays never is."""
        self._wanted: set[SessionId] = set()
        """Those that requests wait for: they leave first."""
        self._under_way: dict[asyncio.Task[None], Session] = {}
        self._left = Counter[str]()
        self._order: list[Session] = []
        self._ordered_at = -ORDER_S
        self._is_full = False
        """Whether resting sessions should go: from `FULL` on, until `EASED`."""
        self._passed_over: dict[str, float] = {}
        """Until when a session that could not go, or a peer that has refused one, is left out of that."""

    async def run(self, within_s: float) -> None:
        """Hand over all sessions that can leave within that time, each when its turn is over. The others stay."""
        table, deadline = self._registry.table, time.monotonic() + within_s - FAREWELL_S
        if self._registry.executor.failure is not None or deadline <= time.monotonic():
            return
        table.evacuates = self._evacuates
        try:
            names = ", ".join(each.name for each in self._fleet.ready) or "none"
            logger.info("drain: sessions here: %d; servers that may take them: %s", len(list(table)), names)
            await self._hand_over(deadline)
        finally:
            table.evacuates = lambda session: False
        self._log("drain: sessions have left: %s; that stay here: %d")
        self.is_over = all(each.ephemeral for each in table)
        if self._fleet.ready or self._left:
            await asyncio.sleep(FAREWELL_S)

    async def _hand_over(self, deadline: float) -> None:
        told_at = alone_since = time.monotonic()
        while (now := time.monotonic()) < deadline and self._registry.executor.failure is None:
            ready, under_way = self._fleet.ready, self._under_way
            are_full = bool(ready) and all(self._refusals[each.name] >= MOST_REFUSALS for each in ready)
            any_to_go = any(self._can_leave(each) for each in self._registry.table)
            if not any_to_go or (are_full and not under_way):
                break
            alone_since = now if ready or under_way else alone_since
            if now - alone_since > ALONE_S:
                logger.warning("drain: no server takes sessions any more")
                break
            while len(under_way) < AT_ONCE and (found := self._next(now)) is not None:
                task = asyncio.create_task(self._give(*found))
                under_way[task] = found[0]
                task.add_done_callback(under_way.pop)
            if now - told_at >= PROGRESS_S:
                told_at = now
                self._log("drain: sessions have left: %s; still here: %d")
            if under_way:
                await asyncio.wait(under_way, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(LOOK_S)
        if self._under_way:  # each ends by itself: what cannot be sent in time fails, and stays
            await asyncio.wait(self._under_way, timeout=max(0.0, deadline - time.monotonic()))

    def _next(self, now: float) -> tuple[Session, Replica] | None:
        """The session that leaves next, and its peer: those that requests wait for, then those expected back first."""
        table, ready, not_before = self._registry.table, self._fleet.ready, self._not_before
        willing = [each for each in ready if self._refusals[each.name] < MOST_REFUSALS]
        peers = [each for each in willing if not_before.get(each.name, 0.0) <= now]
        if not peers:
            return None
        if now - self._ordered_at >= ORDER_S:
            self._ordered_at, at = now, time.time()
            self._order = sorted(table, key=lambda each: (each.id not in self._wanted, *worth(each, at)))
        for session in self._order:
            is_busy = session.under_way or session.requests or session.leaving or session.state is SessionState.CLOSED
            if is_busy or session in self._under_way.values() or not self._can_leave(session):
                continue
            peer = next((each for each in peers if self._tries[session.id, each.name] < TRIES), None)
            if peer is not None and not_before.get(session.id, 0.0) <= now:
                peer.placed += 1
                return session, peer
            if all(self._tries[session.id, each.name] >= TRIES for each in ready):
                not_before[session.id] = math.inf
        return None

    async def _give(self, session: Session, replica: Replica) -> None:
        peer, about = replica.name, {"session": session.id}
        try:
            await self._departures.move(session, peer, MoveReason.DRAIN)
        except (PeerFull, PeerAway, MoveUnsettled) as error:
            self._tries[session.id, peer] += 1
            self._refusals[peer] += 1
            self._not_before[peer] = time.monotonic() + PATIENCE_S
            if not isinstance(error, PeerFull):
                replica.shun(AWAY_S)
        except (PeerMismatch, PeerStranger, NameTaken) as error:
            logger.warning("drain: a session cannot go to %s: %s", peer, error.message, extra=about)
            self._tries[session.id, peer] = TRIES
        except WrongState:  # another request is under way, or it has something that cannot move
            self._tries[session.id, ""] += 1
            may_move = self._tries[session.id, ""] < MOST_DISTURBED
            self._not_before[session.id] = time.monotonic() + DISTURBED_S if may_move else math.inf
        except Exception as error:  # of any kind: otherwise the drain would offer the session without end
            logger.warning("drain: a session stays: %s", error, exc_info=not isinstance(error, DjinnError), extra=about)
            self._not_before[session.id] = math.inf
        else:
            self._refusals[peer] = 0
            self._left[peer] += 1

    def _evacuates(self, session: Session) -> bool:
        if not self._can_leave(session):
            return False
        self._wanted.add(session.id)
        self._ordered_at = -ORDER_S  # at once
        return True

    def _can_leave(self, session: Session) -> bool:
        """Whether the session leaves when its turn is over, as far as is known."""
        return self._not_before.get(session.id, 0.0) < math.inf and not session.ephemeral

    def _log(self, text: str) -> None:
        left = ", ".join(f"{count} to {peer}" for peer, count in sorted(self._left.items())) or "none"
        logger.info(text, left, len([each for each in self._registry.table if not each.ephemeral]))

    # While memory is nearly full.

    async def balance(self) -> None:
        """Until the server shuts down: if memory is nearly full, hand resting sessions to a peer with clearly more."""
        while not self._registry.table.draining:
            await asyncio.sleep(BALANCE_S)
            try:
                if self._registry.executor.failure is None:
                    await self._look()
            except Exception as error:
                if not isinstance(error, EngineAway):
                    logger.warning("balance: %s", error, exc_info=not isinstance(error, DjinnError))

    async def _look(self) -> None:
        own = Load.measured(await self._registry.memory())
        self._is_full = max(own.kv_free, own.host_free) < (EASED if self._is_full else FULL)
        if not self._is_full:
            return
        clock, now = time.monotonic(), time.time()
        self._passed_over = {each: until for each, until in self._passed_over.items() if until > clock}
        resting = [each for each in self._registry.table if self._rests(each, now)]
        peers = [each for each in self._fleet.ready if each.takes_sessions and each.name not in self._passed_over]
        peer = max(peers, key=lambda each: each.seen.load.host_free, default=None)  # sessions arrive in host memory
        if peer is None or peer.seen.load.host_free - own.host_free < CLEARLY:
            return
        # The one whose return is furthest away goes first.
        going = sorted(resting, key=lambda each: returns_in_s(each, now), reverse=True)[:AT_A_LOOK]
        for session in (each for each in going if self._rests(each, now)):  # still
            try:
                await self._departures.move(session, peer.name, MoveReason.BALANCE)
            except (PeerFull, PeerAway):
                self._passed_over[peer.name] = time.monotonic() + SHUNNED_S
            except Exception as error:
                about, is_known = {"session": session.id}, isinstance(error, DjinnError)
                logger.info("a session stays, though memory is full: %s", error, exc_info=not is_known, extra=about)
                self._passed_over[session.id] = time.monotonic() + STAYS_S

    def _rests(self, session: Session, now: float) -> bool:
        """Whether it may go: it has nothing to do, has been here for long enough, and has not just been refused."""
        is_still = session.state in (SessionState.IDLE, SessionState.PAUSED) and not session.requests
        is_free = not session.leaving and not session.ephemeral and session.residency is not Residency.GUARANTEED
        has_kv = session.kv.device_bytes + session.kv.host_bytes > 0
        is_away = session.phase is not Phase.READY and returns_in_s(session, now) >= RESTS_S
        has_settled = session.arrived_at is None or session.arrived_at + STAYS_S <= time.monotonic()
        return is_still and is_free and has_kv and is_away and has_settled and session.id not in self._passed_over
