"""Whose KV is where, and when it moves: what clients signal, what pressure demands, and what each policy makes of both.

`signal` moves KV out when its session says that it waits, and back before it returns; `lru` moves it out only when
others need the room, longest idle first; `none` drops it then. Planning only: time comes from the clock it is given.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable

from app.domain.memory_map import TierCounts
from app.domain.values import KVPolicy, Phase, SessionId, Tier
from app.gpu.kv.moves import Move, Moved, MoveKind
from app.gpu.kv_tiers.ledger import MoveMeter
from app.gpu.kv_tiers.lower import LowerTiers
from app.gpu.kv_tiers.moving import KVTiers
from app.gpu.kv_tiers.phases import Phases
from app.gpu.state.sequence import Sequence
from app.gpu.state.turn import TurnState

WRITE_BEHIND_BLOCKS = 8
"""Blocks in one early copy: few enough that a park which comes meanwhile hardly waits for it."""
LAPSE_S = 30.0
"""How long a session that has not returned when it said is still expected any moment."""
_EVICTED_FIRST = {Phase.IDLE: 0, Phase.IO_WAIT: 1, Phase.COMPUTE: 2, Phase.READY: 3}


class Placement:
    """Places the KV of sessions that have no turn, and finds room for those that have one.

    Such a session is `resident` while it holds device blocks and `lower.away` while its KV is elsewhere.
    """

    def __init__(self, tiers: KVTiers, policy: KVPolicy, disk_blocks: int, clock: Callable[[], float]) -> None:
        self.tiers = tiers
        self.policy = policy
        self.lower = LowerTiers(tiers, disk_blocks, clock)
        self.meter = MoveMeter(tiers.block_bytes)
        self.resident: OrderedDict[SessionId, Sequence] = OrderedDict()
        """Longest idle first."""
        self.active: dict[SessionId, Sequence] = {}
        """Sessions that have a turn."""
        self.headroom: Callable[[], int] = lambda: 0
        """Device blocks that the sessions that run will still need; a prefetch leaves them alone."""
        self.borrow: Callable[[int], bool] = lambda blocks: False
        """Get at least so many device blocks more from weights; whether they are there now."""
        self.phases = Phases(self, clock)
        self._clock = clock
        self._pool = tiers.cache.pool
        self._changed: dict[SessionId, Sequence] = {}
        self._ordered_at: dict[int, float] = {}
        self._early_bytes = self._disk_failures = self._late = 0

    def begin_turn(self, sequence: Sequence, turn: TurnState) -> None:
        """A turn has come: the session is no longer ours to place, and its KV should be on the device."""
        self.phases.forget(sequence)
        self._take_out(sequence)
        sequence.phase, sequence.resume_at = Phase.COMPUTE, None
        self.tiers.head_back(sequence)
        turn.begun_at = self._clock()
        self.note_change(sequence)
        self.active[sequence.session] = sequence
        self._late += sequence.tier not in (Tier.DEVICE, None)

    def end_turn(self, sequence: Sequence) -> None:
        """The session has no turn, or has just been opened with KV."""
        self._take_out(sequence)
        self.note_change(sequence)
        if sequence.blocks:
            self.resident[sequence.session] = sequence
        elif sequence.tier is not None:
            self.lower.away[sequence.session] = sequence

    def cut(self, sequence: Sequence, length: int) -> None:
        """Forget the KV of a session without a turn from position `length` on, in every tier."""
        self.tiers.cut(sequence, length)
        self.refile(sequence)

    def close(self, sequence: Sequence) -> None:
        """Free everything that the session holds in any tier."""
        self.phases.forget(sequence)
        self._take_out(sequence)
        self.lower.free(sequence)

    def note_change(self, sequence: Sequence) -> None:
        """The session's KV has changed its place or size."""
        self._changed[sequence.session] = sequence

    def take_changed(self) -> list[Sequence]:
        """Sessions whose KV has changed its place or size since the last call."""
        changed, self._changed = self._changed, {}
        return list(changed.values())

    def take_orders(self) -> list[Move]:
        """The moves that have been decided on since the last call."""
        orders, self.tiers.ledger.orders = self.tiers.ledger.orders, []
        now = self._clock()
        for move in orders:
            self._ordered_at[move.number] = now
            self.note_change(self.tiers.ledger.find(move.number)[1])
        return orders

    def complete(self, report: Moved) -> Move:
        """Account for a move that has ended, and go on with what it made possible."""
        move, sequence = self.tiers.complete(report)
        self.meter.add(move, report)
        ordered_at = self._ordered_at.pop(move.number)
        if move.early:
            self._early_bytes += len(move.source) * self.tiers.block_bytes
        if report.error is not None and move.kind in (MoveKind.TO_DISK, MoveKind.FROM_DISK):
            self.count_disk_failures(1)
            if move.kind is MoveKind.TO_DISK:
                self.lower.save_failed()
        if sequence.turn is not None and not sequence.turn.paused and move.kind in (MoveKind.IN, MoveKind.FROM_DISK):
            sequence.turn.restore_ms += (self._clock() - max(ordered_at, sequence.turn.begun_at)) * 1000
        self.refile(sequence)
        self.phases.note_change()
        self.phases.tick()
        return move

    @property
    def loading(self) -> int:
        """Blocks that come from disk and will need room on the device."""
        return sum(s.disk_blocks for s in self.tiers.ledger.moving if s.moving is Tier.TO_HOST and not s.blocks)

    def load(self, sequence: Sequence) -> None:
        """Begin to read the file of a session that has a turn, or wait for room; without any hope of it the KV goes."""
        if self.tiers.files.load(sequence):
            return
        loading = self.make_host_room(sequence.disk_blocks, sequence) and self.tiers.files.load(sequence)
        if not loading and not self.lower.host_is_emptying:
            self.lower.drop(sequence)

    def make_room(self, needed: int, for_sequence: Sequence, *, prefetch: bool = False, or_some: bool = False) -> bool:
        """Whether `needed` device blocks are available for a session now, after others without a turn have given way.

        Some may only be on their way out then: ask again when a move has ended. A `prefetch` sends nobody away who
        returns before it. Where they are too few, weights make up for it, but not for a `prefetch`. Where there cannot
        be that many nobody gives way, except with `or_some`. Nothing is taken from the session itself in any tier.
        """
        if self._pool.available >= needed:
            return True
        victims = self._victims(for_sequence if prefetch else None)
        most = self._pool.available + self.tiers.freeing + sum(len(victim.blocks) for victim in victims)
        if most < needed and (prefetch or not self.borrow(needed - most)) and not or_some:
            return False
        for victim in victims:
            if self._pool.available + self.tiers.freeing >= needed:
                break
            self.evict(victim, for_sequence)
        return self._pool.available >= needed

    def evict(self, sequence: Sequence, for_sequence: Sequence) -> bool:
        """Take a session's KV off the device for another, or begin to; one that has nowhere to go loses it.

        False while room for it is still being made on the host.
        """
        if self.policy is KVPolicy.NONE:
            self.lower.drop(sequence)
        elif sequence.tier is Tier.DEVICE and not self.tiers.park(sequence):
            room = self.make_host_room(len(sequence.blocks) - len(sequence.host_blocks), sequence, for_sequence)
            if not (room and self.tiers.park(sequence)) and not self.lower.host_is_emptying:
                self.lower.drop(sequence)
        self.refile(sequence)
        return sequence.tier is not Tier.DEVICE

    def make_host_room(self, needed: int, *keep: Sequence) -> bool:
        """Whether `needed` host blocks are available, after others than `keep` have given way; see `LowerTiers`."""
        copied = [s for s in (*self.active.values(), *self.resident.values()) if s.blocks]
        return self.lower.make_host_room(needed, copied, reversed(self.active.values()), keep)

    def write_behind(self, running: Iterable[Sequence]) -> None:
        """While the link is idle, copy full blocks of one running session to the host, so that a park finds less to
        do.
        """
        if self.policy is not KVPolicy.SIGNAL or self.tiers.ledger.in_flight:
            return
        host = self.tiers.cache.host
        for sequence in (each for each in running if each.waits):
            end = min(len(sequence.hashes), len(sequence.host_blocks) + WRITE_BEHIND_BLOCKS)
            if len(sequence.host_blocks) < end and host.available >= 2 * WRITE_BEHIND_BLOCKS:
                self.tiers.copy_out(sequence, end, early=True)
                return

    def count_disk_failures(self, files: int) -> None:
        """So many files could not be written or read."""
        self._disk_failures += files

    def counts(self) -> TierCounts:
        """What has happened so far."""
        return TierCounts(
            write_behind_bytes=self._early_bytes,
            turned_round=self.tiers.turned_round,
            dropped=self.lower.dropped,
            disk_failures=self._disk_failures,
            late_restores=self._late,
        )

    def _take_out(self, sequence: Sequence) -> None:
        """Take the session out of the lists of where KV is; what it gives up others may have."""
        self.phases.note_change()
        self.active.pop(sequence.session, None)
        self.resident.pop(sequence.session, None)
        self.lower.away.pop(sequence.session, None)

    def _victims(self, for_sequence: Sequence | None) -> list[Sequence]:
        """Residents that may give way, in this order."""
        movable = [s for s in self.resident.values() if s.moving is None and not s.guaranteed]
        if self.policy is not KVPolicy.SIGNAL:
            return movable
        now = self._clock()
        ranks = {s.session: self._rank(s, now) for s in movable}
        if for_sequence is not None:
            back_at, ready = for_sequence.return_time, _EVICTED_FIRST[Phase.READY]
            movable = [s for s in movable if ranks[s.session][0] < ready and -ranks[s.session][1] > back_at]
        return sorted(movable, key=lambda s: ranks[s.session])

    def _rank(self, sequence: Sequence, now: float) -> tuple[int, float]:
        """Smaller gives way earlier: by phase, then the furthest return, negated; equals in the order of their last
        use. Nobody knows when one returns who has not come when it said.
        """
        overdue_s = now - sequence.return_time
        if -2 * self.phases.margin_s <= overdue_s < LAPSE_S:  # it may have been fetched already
            return _EVICTED_FIRST[Phase.READY], 0.0
        if overdue_s >= LAPSE_S:
            return _EVICTED_FIRST[Phase.COMPUTE], -math.inf
        return _EVICTED_FIRST[sequence.phase], -sequence.return_time

    def refile(self, sequence: Sequence) -> None:
        """Keep a session without a turn in the list that its KV belongs to."""
        self.note_change(sequence)
        session = sequence.session
        if session in self.resident and not sequence.blocks:
            del self.resident[session]
            if sequence.tier is not None:
                self.lower.away[session] = sequence
        elif session in self.lower.away and sequence.tier in (Tier.DEVICE, None):
            del self.lower.away[session]
            if sequence.blocks:
                self.resident[session] = sequence
