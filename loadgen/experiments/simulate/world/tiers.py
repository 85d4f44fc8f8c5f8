"""Where one replica's sessions have their KV: device, host, disk. Times are of the simulation, room is in tokens."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count

from loadgen.experiments.simulate.costs import Costs
from loadgen.experiments.simulate.plan import ClusterPlan
from loadgen.experiments.simulate.world.session import Session, Tier


@dataclass(slots=True)
class Traffic:
    """Tokens of KV that moved, by direction, and those that were dropped for want of room."""

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("out", "in", "to_disk", "from_disk"), 0))
    dropped: int = 0


class Tiers:
    """The tiers of one replica. Full blocks are written behind, so KV leaves the device at once; it comes back over a
    link that carries one session at a time.
    """

    def __init__(self, plan: ClusterPlan, costs: Costs, traffic: Traffic) -> None:
        self._plan = plan
        self._block = plan.block_tokens
        self._in_s = costs.bytes_per_token / costs.in_bytes_per_s
        self._from_disk_s = costs.bytes_per_token / (costs.from_disk_bytes_per_s or costs.in_bytes_per_s)
        self._traffic = traffic
        self._free_at_s = 0.0
        self._order = count()
        self._resting: list[tuple[float, int, int, Session]] = []
        """On the device without a turn, the one that returns last first."""
        self.host: OrderedDict[Session, None] = OrderedDict()
        self.disk: OrderedDict[Session, None] = OrderedDict()
        self.device_used = self.host_used = self.disk_used = 0

    @property
    def kv_free(self) -> float:
        """The part of the device's room that no session holds."""
        return 1.0 - self.device_used / self._plan.device_tokens

    def blocks(self, tokens: int) -> int:
        """The room of so many tokens, in whole blocks."""
        return -(-tokens // self._block) * self._block

    def restore_s(self, session: Session) -> float:
        """How long the session's KV takes to the device."""
        return session.kv * (self._in_s + (self._from_disk_s if session.tier is Tier.DISK else 0.0))

    def take(self, session: Session, tokens: int, now: float, *, before_s: float | None = None) -> bool:
        """Give the session room for `tokens` on the device, and bring its KV there. `before_s`: only sessions that
        return later give way. Whether there is room; if not, nothing has changed.
        """
        had = session.claim if session.tier is Tier.DEVICE else 0
        more = self.blocks(tokens) - had
        if not self._make_room(more, session, before_s):
            return False
        if session.tier in (Tier.HOST, Tier.DISK):
            self._bring(session, now)
        session.tier = Tier.DEVICE
        session.claim = had + more
        session.stamp += 1
        self.device_used += more
        return True

    def rest(self, session: Session) -> None:
        """The session has no turn. Its KV stays on the device until others need the room."""
        session.stamp += 1
        heapq.heappush(self._resting, (-session.returns_s, next(self._order), session.stamp, session))

    def park(self, session: Session) -> None:
        """Take the session's KV from the device to the host, and make room there."""
        self.device_used -= session.claim
        session.stamp += 1
        session.claim = self.blocks(session.kv)
        if session.claim > self._plan.host_tokens + self._plan.disk_tokens:
            session.lose_kv()
            self._traffic.dropped += 1
            return
        self._traffic.tokens["out"] += session.kv
        self.receive(session)

    def receive(self, session: Session) -> None:
        """Put KV on the host that is not in any tier here."""
        session.tier, session.claim = Tier.HOST, self.blocks(session.kv)
        self.host[session] = None
        self.host_used += session.claim
        self._spill()

    def forget(self, session: Session) -> None:
        """Free what the session has here; it keeps its own account of it."""
        if session.tier is Tier.DEVICE:
            self.device_used -= session.claim
        elif session.tier is Tier.HOST:
            self.host_used -= session.claim
            del self.host[session]
        elif session.tier is Tier.DISK:
            self.disk_used -= session.claim
            del self.disk[session]
        session.stamp += 1

    def lose_memory(self) -> None:
        """The replica's process is gone. Only what is on disk is left, and whoever had KV elsewhere must be told."""
        self._resting.clear()
        self.host.clear()
        self.device_used = self.host_used = 0
        self._free_at_s = 0.0

    def save(self, session: Session) -> None:
        """Write the session's KV to disk, as a server does that ends."""
        if session.tier in (Tier.DEVICE, Tier.HOST):
            self.forget(session)
            self._to_disk(session)

    def _make_room(self, tokens: int, asking: Session, before_s: float | None) -> bool:
        limit = self._plan.device_tokens - tokens
        if self.device_used <= limit:
            return True
        passed = list[tuple[float, int, int, Session]]()
        chosen, freed = list[Session](), 0
        while self._resting and self.device_used - freed > limit:
            entry = heapq.heappop(self._resting)
            session = entry[3]
            if entry[2] != session.stamp:
                continue
            passed.append(entry)
            if session is asking:
                continue
            if before_s is not None and -entry[0] <= before_s:
                break
            chosen.append(session)
            freed += session.claim
        enough = self.device_used - freed <= limit
        gone = set(map(id, chosen)) if enough else set()
        for entry in passed:
            if id(entry[3]) not in gone:
                heapq.heappush(self._resting, entry)
        if enough:
            for session in chosen:
                self.park(session)
        return enough

    def _bring(self, session: Session, now: float) -> None:
        self._traffic.tokens["in"] += session.kv
        if session.tier is Tier.DISK:
            self._traffic.tokens["from_disk"] += session.kv
        self._free_at_s = max(now, self._free_at_s) + self.restore_s(session)
        session.ready_s = self._free_at_s
        self.forget(session)

    def _spill(self) -> None:
        while self.host_used > self._plan.host_tokens:
            session, _ = self.host.popitem(last=False)
            self.host_used -= session.claim
            self._to_disk(session)

    def _to_disk(self, session: Session) -> None:
        session.stamp += 1
        session.claim = self.blocks(session.kv)
        while self.disk and self.disk_used + session.claim > self._plan.disk_tokens:
            oldest, _ = self.disk.popitem(last=False)
            self.disk_used -= oldest.claim
            oldest.lose_kv()
            self._traffic.dropped += 1
        if self.disk_used + session.claim > self._plan.disk_tokens:
            session.lose_kv()
            self._traffic.dropped += 1
            return
        session.tier = Tier.DISK
        self.disk[session] = None
        self.disk_used += session.claim
        self._traffic.tokens["to_disk"] += session.kv
