"""What clients say of their sessions, and the moves that follow: away while a tool runs, back before it returns."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.domain import KVPolicy, Phase, SessionId, Tier
from app.gpu.kv_moves import MoveKind
from app.gpu.sequence import Sequence

if TYPE_CHECKING:
    from app.gpu.placement import Placement

PREFETCH_MARGIN_S = 0.1
"""How long before its return a session's KV should be on the device."""

ALARMS_KEPT = 10_000
"""More than this, and those that have been overtaken are thrown out."""


class Phases:
    """Sessions without a turn that are on their way out (`leaving`) or wanted back, and when others will be."""

    def __init__(self, placement: Placement, clock: Callable[[], float]) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._clock = clock
        self._leaving: OrderedDict[SessionId, Sequence] = OrderedDict()
        self._wanted: OrderedDict[SessionId, Sequence] = OrderedDict()
        self._alarms: list[tuple[float, SessionId, float]] = []
        """When to fetch a session, and the return that this is for."""

    def signal(self, sequence: Sequence, phase: Phase, resume_in_s: float | None) -> None:
        """Note what the client says of a session without a turn, and start to move its KV if the policy listens."""
        sequence.phase = phase
        if phase is Phase.READY:
            resume_in_s = 0.0
        sequence.resume_at = None if resume_in_s is None else self._clock() + resume_in_s
        if self._placement.policy is not KVPolicy.SIGNAL or sequence.tier is None:
            return
        if phase in (Phase.READY, Phase.COMPUTE):
            self._want(sequence)
        else:
            sequence.waits = True
            self._wanted.pop(sequence.session, None)
            if sequence.moving is Tier.TO_DEVICE:
                self._tiers.turn_round(sequence)
            self._leaving[sequence.session] = sequence
            self._set_alarm(sequence)
        self.tick()

    def repeat(self, sequence: Sequence) -> None:
        """Go on with what the client has said last, after the session's KV has been changed."""
        resume_in_s = None if sequence.resume_at is None else max(0.0, sequence.resume_at - self._clock())
        if sequence.phase is not Phase.COMPUTE:
            self.signal(sequence, sequence.phase, resume_in_s)

    def tick(self) -> None:
        """Go on with everything that waits for its time or for room."""
        now = self._clock()
        while self._alarms and self._alarms[0][0] <= now:
            alarm = heapq.heappop(self._alarms)
            sequence = self._placement.find(alarm[1])
            if sequence is not None and self._is_due(alarm):
                self._want(sequence)
        for sequence in list(self._leaving.values()):
            self._send_away(sequence, now)
        for sequence in sorted(self._wanted.values(), key=lambda wanted: wanted.return_time):
            self._prefetch(sequence)

    def next_alarm(self) -> float | None:
        """When `tick` must be called again even if nothing else happens, on the clock."""
        return self._alarms[0][0] if self._alarms else None

    def _is_due(self, alarm: tuple[float, SessionId, float]) -> bool:
        """Whether the alarm is still what its session has said last."""
        sequence = self._placement.find(alarm[1])
        return sequence is not None and sequence.resume_at == alarm[2]

    def forget(self, sequence: Sequence) -> None:
        """The session has a turn now, or is gone, or is filed anew."""
        self._leaving.pop(sequence.session, None)
        self._wanted.pop(sequence.session, None)

    def _want(self, sequence: Sequence) -> None:
        self._leaving.pop(sequence.session, None)
        self._tiers.head_back(sequence)
        if sequence.session in self._placement.lower.away:
            self._wanted[sequence.session] = sequence

    def _send_away(self, sequence: Sequence, now: float) -> None:
        """One step on the way down for a session that waits: to the host, and from there to disk if it is `idle`."""
        if sequence.tier is Tier.DEVICE:
            if sequence.return_time - now < self._round_trip_s(sequence):
                del self._leaving[sequence.session]  # it would be back before the move was done
                return
            missing = len(sequence.blocks) - len(sequence.host_blocks)
            if not self._tiers.park(sequence) and self._placement.make_host_room(missing, sequence):
                self._tiers.park(sequence)
            self._placement.refile(sequence)
        if sequence.tier is Tier.HOST:
            del self._leaving[sequence.session]
            if sequence.phase is Phase.IDLE:
                self._placement.lower.save(sequence)
        elif sequence.tier in (Tier.DISK, None):
            del self._leaving[sequence.session]

    def _prefetch(self, sequence: Sequence) -> None:
        """One step on the way up for a session that is about to return."""
        placement = self._placement
        if sequence.tier is Tier.HOST:
            needed = self._tiers.restore_need(sequence) + placement.headroom()
            if placement.make_room(needed, sequence, prefetch=True) and self._tiers.restore(sequence):
                placement.refile(sequence)
        elif sequence.tier is Tier.DISK:
            needed = sequence.disk_blocks + placement.loading + placement.headroom()
            if placement.make_room(needed, sequence, prefetch=True) and not self._tiers.load(sequence):
                placement.make_host_room(sequence.disk_blocks, sequence)
        if sequence.tier in (Tier.DEVICE, None):
            self._wanted.pop(sequence.session, None)

    def _set_alarm(self, sequence: Sequence) -> None:
        if sequence.resume_at is not None:
            if len(self._alarms) > ALARMS_KEPT:
                self._alarms = [alarm for alarm in self._alarms if self._is_due(alarm)]
                heapq.heapify(self._alarms)
            heapq.heappush(self._alarms, (self._prefetch_at(sequence), sequence.session, sequence.resume_at))

    def _prefetch_at(self, sequence: Sequence) -> float:
        """When the way back must begin so that it ends a margin before the session returns."""
        assert sequence.resume_at is not None
        return sequence.resume_at - PREFETCH_MARGIN_S - self._placement.meter.seconds(MoveKind.IN, self._size(sequence))

    def _round_trip_s(self, sequence: Sequence) -> float:
        out, back = (self._placement.meter.seconds(kind, self._size(sequence)) for kind in (MoveKind.OUT, MoveKind.IN))
        return out + back

    def _size(self, sequence: Sequence) -> int:
        return self._tiers.cache.pool.blocks_for(sequence.computed)
