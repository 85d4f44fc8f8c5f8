"""A server whose memory is nearly full hands resting sessions to one with clearly more room."""

from __future__ import annotations

import asyncio
import logging
import time

from app.cluster.claims import Load
from app.cluster.fleet import Fleet
from app.cluster.moves.departures import Departures
from app.domain.errors import DjinnError, EngineAway, PeerAway, PeerFull
from app.domain.homes import MoveReason
from app.domain.values import Phase, Residency, SessionId, SessionState
from app.sessions.lifecycle import returns_in_s
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session

logger = logging.getLogger(__name__)

LOOK_S = 1.0
AT_A_LOOK = 2
"""How many sessions go between two looks, one after the other."""
FULL, EASED = 0.1, 0.2
"""Free parts of memory: with less than the first in both tiers sessions go, until there is the second in one."""
CLEARLY = 0.25
"""How much more of its host memory a peer must have free: what it gets must not make it the fuller one."""
RESTS_S = 30.0
"""A session that may go on sooner stays."""
STAYS_S = 600.0
"""How long one stays that has come from another server."""
SHUNNED_S = 30.0
"""How long a peer that has refused one is offered none."""


class Balance:
    """Used on the event loop only."""

    def __init__(self, registry: SessionRegistry, departures: Departures, fleet: Fleet) -> None:
        self._registry = registry
        self._departures = departures
        self._fleet = fleet
        self._is_full = False
        """Whether sessions should go: from `FULL` on, until `EASED`."""
        self._stays: dict[SessionId, float] = {}
        """Until when sessions stay that could not go."""
        self._shunned: dict[str, float] = {}
        """Until when, by peer."""

    async def run(self) -> None:
        """Look until the server shuts down."""
        while not self._registry.table.draining:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except EngineAway:
                pass
            except DjinnError as error:
                logger.warning("balance: %s", error.message)

    async def _look(self) -> None:
        if self._registry.executor.failure is not None:
            return
        own = Load.measured(await self._registry.memory())
        self._is_full = max(own.kv_free, own.host_free) < (EASED if self._is_full else FULL)
        if not self._is_full or not (resting := self._resting()):
            return
        now = time.monotonic()
        told = [
            (each.load.host_free, each.load.kv_free, each.name)
            for each in self._fleet.ready
            if each.load and each.takes_sessions and self._shunned.get(each.name, 0.0) <= now
        ]
        host_free, _, peer = max(told, default=(0.0, 0.0, ""))  # sessions arrive in host memory
        for session in resting[:AT_A_LOOK] if host_free - own.host_free >= CLEARLY else ():
            await self._give(session, peer)

    async def _give(self, session: Session, peer: str) -> None:
        if session.state is SessionState.CLOSED or session.under_way or session.requests or session.leaving:
            return
        try:
            await self._departures.move(session, peer, MoveReason.BALANCE)
        except (PeerFull, PeerAway):
            self._shunned[peer] = time.monotonic() + SHUNNED_S
        except DjinnError as error:
            logger.info("a session stays, though memory is full: %s", error.message, extra={"session": session.id})
            self._stays[session.id] = time.monotonic() + STAYS_S

    def _resting(self) -> list[Session]:
        """Those that may go, the one whose return is furthest away first."""
        now = time.time()
        self._stays = {key: until for key, until in self._stays.items() if self._registry.table.find(key)}
        found = [each for each in self._registry.table if self._rests(each, now)]
        return sorted(found, key=lambda each: returns_in_s(each, now), reverse=True)

    def _rests(self, session: Session, now: float) -> bool:
        """Whether it may go: it has nothing to do, has been here for long enough, and has not just been refused."""
        clock = time.monotonic()
        is_still = session.state in (SessionState.IDLE, SessionState.PAUSED) and not session.requests
        is_free = not session.leaving and not session.ephemeral and session.residency is not Residency.GUARANTEED
        has_kv = session.kv.device_bytes + session.kv.host_bytes > 0
        is_away = session.phase is not Phase.READY and returns_in_s(session, now) >= RESTS_S
        has_settled = session.arrived_at is None or session.arrived_at + STAYS_S <= clock
        is_welcome = self._stays.get(session.id, clock) <= clock
        return is_still and is_free and has_kv and is_away and has_settled and is_welcome
