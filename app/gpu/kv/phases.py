"""Clients signal the phases of their sessions: KV is offloaded while a tool runs and prefetched before it returns."""

import math
from collections.abc import Callable

from app.domain.values import KVPolicy, Phase, Tier
from app.gpu.kv.leaving import RETRY_S, LeavingSessions
from app.gpu.kv.placement import Placement
from app.gpu.kv.prefetch import PrefetchOrder
from app.gpu.kv.return_order import Blocks, ReturnOrder
from app.gpu.state.moves import MoveKind
from app.gpu.state.sequence import TokenSequence

TRIED = 4
"""After so many prefetches that find no room, those that return still later wait for the next look."""
BLOCKS_A_LOOK = 256
"""Once prefetches of so many blocks have begun, the others wait for the next look, which comes after the next step: to
begin them takes time that a step waits for, and the link is busy meanwhile.
"""


class Phases:
    """Sessions without a turn: those to offload (`leaving`), to prefetch now (`wanted`), and to prefetch later."""

    def __init__(self, placement: Placement, headroom: Callable[[], int]) -> None:
        """`headroom` is how many device blocks the sessions that run will still need: a prefetch leaves them alone."""
        self._placement = placement
        self._headroom = headroom
        self._tiers = placement.tiers
        self._clock = placement.clock
        self._wanted = ReturnOrder(self._blocks)
        self._expected = PrefetchOrder(self._blocks)
        self._leaving = LeavingSessions(placement, self._expected.note_moved)
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
        self._expected.remove(sequence)
        if phase in (Phase.READY, Phase.COMPUTE):
            self._want(sequence)
        else:
            sequence.waits = True
            self._wanted.remove(sequence)
            if sequence.moving is Tier.TO_DEVICE:
                self._tiers.turn_round(sequence)
                self._placement.note_placed(sequence)
            self._leaving.add(sequence)
            if sequence.resume_at is not None:
                self._expected.add(sequence)
        self._go_on()

    def repeat(self, sequence: TokenSequence) -> None:
        """Signal the session's last phase again, after its KV has changed."""
        resume_in_s = None if sequence.resume_at is None else max(0.0, sequence.resume_at - self._clock())
        if sequence.phase is not Phase.COMPUTE:
            self.signal(sequence, sequence.phase, resume_in_s)

    def forget(self, sequence: TokenSequence) -> None:
        """The session gets a turn, or is closed."""
        self._leaving.discard(sequence.session)
        self._wanted.remove(sequence)
        self._expected.remove(sequence)

    def rest(self) -> None:
        """Begin no more moves, whatever is signalled: the engine is about to stop."""
        self._listens = False
        self._leaving.clear()
        self._wanted, self._expected = ReturnOrder(self._blocks), PrefetchOrder(self._blocks)

    def tick(self) -> None:
        """Go on with every session that waits for its time or for room. Costs nothing while neither has come."""
        if self._placement.changed or self._clock() >= min(self._expected.next_start, self._retry_at):
            self._go_on()

    def next_alarm(self) -> float | None:
        """When `tick` must be called again even if nothing else happens; a time of the clock, None: never."""
        if self._placement.changed and (self._leaving or self._wanted):
            return self._clock()
        alarm = min(self._expected.next_start, self._retry_at)
        return None if alarm == math.inf else alarm

    def _go_on(self) -> None:
        now = self._clock()
        self._placement.changed = False
        self._placement.forget_order()
        for sequence in self._placement.take_moved():
            self._expected.note_moved(sequence)
            self._wanted.note_moved(sequence)
            self._leaving.note_moved(sequence)
        seconds = self._placement.meter.seconds
        block_s = seconds(MoveKind.FROM_DISK, 1), seconds(MoveKind.IN, 1)
        busy_s = float(self._wanted.blocks.sum(axis=1) @ block_s) if self._wanted else 0.0
        for sequence in self._expected.take_due(now, self._placement.margin.seconds, block_s, busy_s=busy_s):
            self._want(sequence)
        self._leaving.look(now)
        self._prefetch_all()
        self._retry_at = now + RETRY_S if self._leaving or self._wanted else math.inf

    def _want(self, sequence: TokenSequence) -> None:
        self._leaving.discard(sequence.session)
        was_moving = sequence.moving
        self._tiers.head_back(sequence)
        if sequence.moving is not was_moving:
            self._placement.note_placed(sequence)
        if sequence.session in self._placement.lower.away:
            self._wanted.add(sequence)

    def _prefetch_all(self) -> None:
        headroom, failed, begun = self._headroom() if self._wanted else 0, 0, 0
        for sequence in self._wanted:
            before = sequence.moving
            if not self._prefetch(sequence, headroom):
                failed += 1
            elif sequence.moving is not before:
                begun += self._tiers.cache.pool.blocks_for(sequence.computed)
            if failed == TRIED:
                break
            if begun >= BLOCKS_A_LOOK:
                self._placement.changed = True
                break

    def _prefetch(self, sequence: TokenSequence, headroom: int) -> bool:
        """Move the KV of a session that is about to return up by one tier, and leave `headroom` blocks. False: no room
        yet.
        """
        placement, begins = self._placement, True
        if sequence.tier is Tier.HOST:
            needed = self._tiers.restore_need(sequence) + headroom
            begins = self._makes_room(needed, sequence) and self._tiers.restore(sequence)
            if begins:
                placement.refile(sequence)
        elif sequence.tier is Tier.DISK:
            needed = sequence.disk_blocks + placement.loading + headroom
            begins = self._makes_room(needed, sequence) and self._loads(sequence)
        if sequence.tier in (Tier.DEVICE, None):
            self._wanted.remove(sequence)
        return begins

    def _makes_room(self, needed: int, sequence: TokenSequence) -> bool:
        """No session loses KV for a session that no turn waits for yet."""
        return self._placement.eviction.make_room(needed, sequence, prefetch=True, may_lose=False)

    def _loads(self, sequence: TokenSequence) -> bool:
        load = self._tiers.files.load
        make_host_room = self._placement.eviction.make_host_room
        return load(sequence) or (make_host_room(sequence.disk_blocks, sequence) and load(sequence))

    def _blocks(self, sequence: TokenSequence) -> Blocks:
        """What a restore reads from disk, and what it copies to the device."""
        blocks, tier = self._tiers.cache.pool.blocks_for(sequence.computed), sequence.tier
        if tier is Tier.DEVICE and sequence.session not in self._leaving:
            return 0, 0
        return (blocks if tier is Tier.DISK or (tier is Tier.TO_HOST and not sequence.blocks) else 0), blocks
