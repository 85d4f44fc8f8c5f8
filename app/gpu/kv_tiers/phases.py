"""Clients signal the phases of their sessions: KV is offloaded while a tool runs and prefetched before it returns."""

import math
from collections import OrderedDict
from collections.abc import Callable

from app.domain.values import KVPolicy, Phase, SessionId, Tier
from app.gpu.kv.moves import MoveKind
from app.gpu.kv_tiers.placement import Placement
from app.gpu.kv_tiers.prefetch import PrefetchOrder
from app.gpu.state.sequence import TokenSequence

RETRY_S = 0.1
"""How often sessions that wait for room try again although nothing has changed. Time alone can give room: a session is
overdue, or a disk may be written again.
"""


class Phases:
    """Sessions without a turn: those to offload (`leaving`), to prefetch now (`wanted`), and to prefetch later."""

    def __init__(self, placement: Placement, headroom: Callable[[], int]) -> None:
        """`headroom` is how many device blocks the sessions that run will still need: a prefetch leaves them alone."""
        self._placement = placement
        self._headroom = headroom
        self._tiers = placement.tiers
        self._clock = placement.clock
        self._leaving: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        self._wanted: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        self._prefetch_order = PrefetchOrder(self._restore_s, placement.margin)
        self._listens = placement.policy is KVPolicy.SIGNAL
        self._retry_at = math.inf

    def signal(self, sequence: TokenSequence, phase: Phase, resume_in_s: float | None) -> None:
        """Note the phase of a session without a turn. With policy `signal` its KV begins to move."""
        sequence.phase = phase
        if phase is Phase.READY:
            resume_in_s = 0.0
        sequence.resume_at = None if resume_in_s is None else self._clock() + resume_in_s
        if not self._listens or sequence.tier is None:
            return
        self._prefetch_order.remove(sequence)
        if phase in (Phase.READY, Phase.COMPUTE):
            self._want(sequence)
        else:
            sequence.waits = True
            self._wanted.pop(sequence.session, None)
            if sequence.moving is Tier.TO_DEVICE:
                self._tiers.turn_round(sequence)
            self._leaving[sequence.session] = sequence
            if sequence.resume_at is not None:
                self._prefetch_order.add(sequence)
        self._go_on()

    def repeat(self, sequence: TokenSequence) -> None:
        """Signal the session's last phase again, after its KV has changed."""
        resume_in_s = None if sequence.resume_at is None else max(0.0, sequence.resume_at - self._clock())
        if sequence.phase is not Phase.COMPUTE:
            self.signal(sequence, sequence.phase, resume_in_s)

    def forget(self, sequence: TokenSequence) -> None:
        """The session gets a turn, or is closed."""
        self._leaving.pop(sequence.session, None)
        self._wanted.pop(sequence.session, None)
        self._prefetch_order.remove(sequence)

    def tick(self) -> None:
        """Go on with every session that waits for its time or for room. Costs nothing while neither has come."""
        if self._placement.changed or self._clock() >= min(self._prefetch_order.next_start, self._retry_at):
            self._go_on()

    def next_alarm(self) -> float | None:
        """When `tick` must be called again even if nothing else happens; a time of the clock, None: never."""
        if self._placement.changed and (self._leaving or self._wanted):
            return self._clock()
        return None if self._prefetch_order.next_start == math.inf else self._prefetch_order.next_start

    def _go_on(self) -> None:
        now = self._clock()
        self._placement.changed = False
        busy_s = sum(self._restore_s(sequence) for sequence in self._wanted.values())
        for sequence in self._prefetch_order.take_due(now, busy_s, self._restore_all_s()):
            self._want(sequence)
        for sequence in list(self._leaving.values()):
            self._send_away(sequence, now)
        for sequence in sorted(self._wanted.values(), key=lambda wanted: wanted.return_time):
            self._prefetch(sequence)
        self._retry_at = now + RETRY_S if self._leaving or self._wanted else math.inf

    def _want(self, sequence: TokenSequence) -> None:
        self._leaving.pop(sequence.session, None)
        self._tiers.head_back(sequence)
        if sequence.session in self._placement.lower.away:
            self._wanted[sequence.session] = sequence

    def _send_away(self, sequence: TokenSequence, now: float) -> None:
        """Offload a session that waits by one tier: to the host, and from there to disk if it is `idle`."""
        gap_s = sequence.return_time - now
        if sequence.tier is Tier.DEVICE:
            if gap_s < self._seconds(sequence, MoveKind.OUT, MoveKind.IN):
                del self._leaving[sequence.session]  # it would be back before the move was done
                return
            missing = len(sequence.blocks) - len(sequence.host_blocks)
            if not self._tiers.park(sequence) and self._placement.make_host_room(missing, sequence):
                self._tiers.park(sequence)
            self._placement.refile(sequence)
        if sequence.tier is Tier.HOST:
            del self._leaving[sequence.session]
            by_disk_s = self._seconds(sequence, MoveKind.TO_DISK, MoveKind.FROM_DISK, MoveKind.IN)
            if sequence.phase is Phase.IDLE and gap_s >= by_disk_s:
                self._placement.lower.save(sequence)
        elif sequence.tier in (Tier.DISK, None):
            del self._leaving[sequence.session]

    def _prefetch(self, sequence: TokenSequence) -> None:
        """Move the KV of a session that is about to return up by one tier."""
        placement = self._placement
        if sequence.tier is Tier.HOST:
            needed = self._tiers.restore_need(sequence) + self._headroom()
            if placement.make_room(needed, sequence, prefetch=True) and self._tiers.restore(sequence):
                placement.refile(sequence)
        elif sequence.tier is Tier.DISK:
            needed = sequence.disk_blocks + placement.loading + self._headroom()
            load = self._tiers.files.load
            lacks_host_room = placement.make_room(needed, sequence, prefetch=True) and not load(sequence)
            if lacks_host_room and placement.make_host_room(sequence.disk_blocks, sequence):
                load(sequence)
        if sequence.tier in (Tier.DEVICE, None):
            self._wanted.pop(sequence.session, None)

    def _restore_s(self, sequence: TokenSequence) -> float:
        """How long a restore keeps the link busy, with the time to read the session's file if its KV is there."""
        tier = sequence.tier
        if tier is Tier.DEVICE and sequence.session not in self._leaving:
            return 0.0
        if tier is Tier.DISK or (tier is Tier.TO_HOST and not sequence.blocks):
            return self._seconds(sequence, MoveKind.FROM_DISK, MoveKind.IN)
        return self._seconds(sequence, MoveKind.IN)

    def _restore_all_s(self) -> float:
        """How long it would take to restore all that the lower tiers can hold."""
        seconds, on_disk = self._placement.meter.seconds, self._placement.lower.disk_blocks
        all_blocks = self._tiers.cache.host.num_blocks + on_disk
        return seconds(MoveKind.FROM_DISK, on_disk) + seconds(MoveKind.IN, all_blocks)

    def _seconds(self, sequence: TokenSequence, *kinds: MoveKind) -> float:
        blocks = self._tiers.cache.pool.blocks_for(sequence.computed)
        return sum(self._placement.meter.seconds(kind, blocks) for kind in kinds)
