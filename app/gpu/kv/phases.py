"""Clients signal the phases of their sessions: KV is offloaded while a tool runs and prefetched before it returns."""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from app.domain.values import KVPolicy, Phase, SessionId, Tier
from app.gpu.kv.placement import Placement
from app.gpu.kv.ranking import Blocks, ReturnOrder
from app.gpu.state.moves import MoveKind
from app.gpu.state.sequence import TokenSequence

TRIED = 4
"""After so many prefetches that find no room, those that return still later wait for the next look."""
BLOCKS_A_LOOK = 256
"""Once prefetches of so many blocks have begun, the others wait for the next look, which comes after the next step: to
begin them takes time that a step waits for, and the link is busy meanwhile.
"""
RETRY_S = 0.1
"""How often sessions that wait for room try again although nothing has changed. Time alone can give room: a session is
overdue, or a disk may be written again.
"""


class Phases:
    """Sessions without a turn. Those whose clients wait leave the device, and go on to disk if they are idle; those
    about to return are prefetched, now (`wanted`) or later (`expected`). Those that leave already, and those that find
    no room on the host (`stuck`), cost nothing until that changes.
    """

    def __init__(self, placement: Placement, headroom: Callable[[], int]) -> None:
        """`headroom` is how many device blocks the sessions that run will still need: a prefetch leaves them alone."""
        self._placement = placement
        self._headroom = headroom
        self._tiers = placement.tiers
        self._host = placement.tiers.cache.host
        self._clock = placement.clock
        self._listens = placement.policy is KVPolicy.SIGNAL
        self._wanted, self._expected = ReturnOrder(self._blocks), ReturnOrder(self._blocks)
        self._to_leave: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        """Those to send away at the next look."""
        self._leaving: dict[SessionId, TokenSequence] = {}
        """Those on their way: there is nothing to look at until that ends."""
        self._stuck: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        """Those on the device that have found no room on the host."""
        self._no_room = math.inf
        """So many host blocks could not be had: the fewest that any of the stuck ones needs."""
        self._again_at = math.inf
        """When the stuck ones are looked at again although the host has no room."""
        self._host_changes = 0
        """Changes of the host's pool when they were last looked at."""
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
                self._tiers.cancel_move(sequence)
                self._placement.note_placed(sequence)
            self._stay(sequence)
            self._to_leave[sequence.session] = sequence
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
        self._stay(sequence)
        self._wanted.remove(sequence)
        self._expected.remove(sequence)

    def rest(self) -> None:
        """Begin no more moves, whatever is signalled: the engine is about to stop."""
        self._listens = False
        for sessions in (self._to_leave, self._leaving, self._stuck):
            sessions.clear()
        self._wanted, self._expected = ReturnOrder(self._blocks), ReturnOrder(self._blocks)

    def tick(self) -> None:
        """Go on with every session that waits for its time or for room. Costs nothing while neither has come."""
        if self._placement.changed or self._clock() >= min(self._expected.next_start, self._retry_at):
            self._go_on()

    def next_alarm(self) -> float | None:
        """When `tick` must be called again even if nothing else happens; a time of the clock, None: never."""
        if self._placement.changed and self._has_more:
            return self._clock()
        alarm = min(self._expected.next_start, self._retry_at)
        return None if alarm == math.inf else alarm

    @property
    def _has_more(self) -> bool:
        return bool(self._to_leave or self._leaving or self._stuck or self._wanted)

    def _go_on(self) -> None:
        now, placement = self._clock(), self._placement
        placement.changed = False
        placement.forget_order()
        for sequence in placement.take_moved():
            self._expected.note_moved(sequence)
            self._wanted.note_moved(sequence)
            if sequence.session in self._stuck or sequence.session in self._leaving:
                self._stay(sequence)
                self._to_leave[sequence.session] = sequence
        block_s = placement.meter.seconds(1, MoveKind.FROM_DISK), placement.meter.seconds(1, MoveKind.IN)
        busy_s = self._wanted.restore_s(block_s)
        for sequence in self._expected.take_due(now, placement.margin_s, block_s, busy_s=busy_s):
            self._want(sequence)
        self._send_all_away(now)
        self._prefetch_all()
        self._retry_at = now + RETRY_S if self._has_more else math.inf

    def _stay(self, sequence: TokenSequence) -> None:
        """Send it away no more."""
        for sessions in (self._to_leave, self._leaving, self._stuck):
            sessions.pop(sequence.session, None)

    def _want(self, sequence: TokenSequence) -> None:
        self._stay(sequence)
        was_moving = sequence.moving
        self._tiers.head_back(sequence)
        if sequence.moving is not was_moving:
            self._placement.note_placed(sequence)
        if sequence.session in self._placement.away:
            self._wanted.add(sequence)

    def _prefetch_all(self) -> None:
        headroom, failed, begun = self._headroom() if self._wanted else 0, 0, 0
        for sequence in self._wanted:
            before = sequence.moving
            if not self._prefetch(sequence, headroom):
                failed += 1
            elif sequence.moving is not before:
                begun += self._tiers.cache.pool.kept_for(sequence.computed)
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
        # No session loses KV for a session that no turn waits for yet.
        make_room = partial(placement.make_room, for_sequence=sequence, prefetch=True, may_lose=False)
        if sequence.tier is Tier.HOST:
            begins = make_room(self._tiers.restore_need(sequence) + headroom) and self._tiers.restore(sequence)
            if begins:
                placement.refile(sequence)
        elif sequence.tier is Tier.DISK:
            begins = make_room(sequence.disk_blocks + placement.loading + headroom) and placement.begin_load(sequence)
        if sequence.tier in (Tier.DEVICE, None):
            self._wanted.remove(sequence)
        return begins

    def _blocks(self, sequence: TokenSequence) -> Blocks:
        """What a restore reads from disk, and what it copies to the device."""
        blocks, tier, session = self._tiers.cache.pool.kept_for(sequence.computed), sequence.tier, sequence.session
        leaves = session in self._to_leave or session in self._leaving or session in self._stuck
        if tier is Tier.DEVICE and not leaves:
            return 0, 0
        return (blocks if tier is Tier.DISK or (tier is Tier.TO_HOST and not sequence.blocks) else 0), blocks

    def _send_all_away(self, now: float) -> None:
        """Send away the sessions that can go now. Those that would be back before their KV had moved stay."""
        if self._stuck:
            for sequence in self._unstuck(now):
                self._to_leave[sequence.session] = self._stuck.pop(sequence.session)
        to_leave, self._to_leave = self._to_leave, OrderedDict()
        stay = [sequence for sequence in to_leave.values() if not self._send_away(sequence, now)]
        for sequence in stay:
            self._expected.note_moved(sequence)
        if not self._stuck:
            self._no_room = self._again_at = math.inf

    def _unstuck(self, now: float) -> list[TokenSequence]:
        """Those for which there may be room by now."""
        first, due = next(iter(self._stuck.values())), now >= self._again_at
        if due:
            self._again_at = now + RETRY_S
        room = self._host.available >= self._no_room
        if room or (due and self._placement.make_host_room(int(self._no_room), first)):
            self._no_room = math.inf
            return list(self._stuck.values())
        if not due or self._host_changes == self._host.changes:
            return []
        self._host_changes = self._host.changes
        return [sequence for sequence in self._stuck.values() if self._tiers.cache.next_copies(sequence)]

    def _send_away(self, sequence: TokenSequence, now: float) -> bool:
        """Offload a session that waits by one tier: to the host, and from there to disk if it is `idle`. False: it
        would be back before the move was done.
        """
        gap_s, blocks = sequence.return_time - now, self._tiers.cache.pool.kept_for(sequence.computed)
        seconds = self._placement.meter.seconds
        if sequence.tier is Tier.DEVICE:
            if gap_s < seconds(blocks, MoveKind.OUT, MoveKind.IN):
                return False
            if not self._park(sequence):
                self._stuck[sequence.session] = sequence
                self._no_room = min(self._no_room, sequence.uncopied)
                if self._again_at == math.inf:
                    self._again_at, self._host_changes = now + RETRY_S, self._host.changes
        if sequence.tier is Tier.HOST:
            by_disk_s = seconds(blocks, MoveKind.TO_DISK, MoveKind.FROM_DISK, MoveKind.IN)
            if sequence.phase is Phase.IDLE and gap_s >= by_disk_s:
                self._placement.save(sequence)
        elif sequence.moving is not None:
            self._leaving[sequence.session] = sequence
        return True

    def _park(self, sequence: TokenSequence) -> bool:
        """Begin to move the KV to the host, if that has room or can make some; returns whether it has left."""
        missing = sequence.uncopied
        if self._host.available < missing >= self._no_room and not self._tiers.cache.next_copies(sequence):
            return False
        before = sequence.tier, len(sequence.blocks), len(sequence.host_blocks)
        if not self._tiers.park(sequence):
            missing = sequence.uncopied  # the host may have had some of the content
            if missing < self._no_room and self._placement.make_host_room(missing, sequence):
                self._tiers.park(sequence)
        if (sequence.tier, len(sequence.blocks), len(sequence.host_blocks)) != before:
            self._placement.refile(sequence)
        return sequence.tier is not Tier.DEVICE
