"""Clients signal the phases of their sessions: KV is offloaded while a tool runs and prefetched before it returns.

At the end of the server no signal counts any more: KV on the device and on the host is written to disk, as far as there
is room and time.
"""

import math
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from app.domain.values import EARLY_WAITS, KVPolicy, Phase, SessionId, Tier
from app.gpu.kv.placement import Placement
from app.gpu.kv.ranking import LAPSE_S, Blocks, Gap, ReturnOrder
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
UNDER_WAY_BYTES = 256 << 20
"""So much KV is on its way to disk at once, or one session's: little enough to be soon over when the time is."""
STARTS = 2
"""So often a session's copies to the host begin: the first time, it may get full behind a copy under way."""


class Phases:
    """Sessions without a turn. Those whose clients wait leave the device, at once or when the wait has gone on for so
    long that it pays, and go on to disk if they are idle, or if they wait on while the host fills; those about to
    return are prefetched, now (`wanted`) or later (`expected`). Those that leave already, and those that find no room
    on the host (`stuck`), cost nothing until that changes.
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
        self._gaps: dict[SessionId, Gap] = {}
        """The waits of sessions whose clients wait."""
        self._again: dict[SessionId, tuple[float, TokenSequence]] = {}
        """Those that stay in their tier for now, and when they are looked at again."""
        self._looks: list[tuple[float, SessionId]] = []
        """The same in order."""
        self._host_changes = 0
        """Changes of the host's pool when they were last looked at."""
        self._retry_at = math.inf

    def signal(
        self, sequence: TokenSequence, phase: Phase, resume_in_s: float | None, lengths: Sequence[float] = ()
    ) -> None:
        """Note the phase of a session without a turn. With policy `signal` its KV begins to move.

        `lengths` are the seconds that earlier waits of the kind took, in ascending order: then nobody knows when this
        one ends.
        """
        sequence.phase = phase
        self._gaps.pop(sequence.session, None)
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
            self._gaps[sequence.session] = Gap(self._clock(), lengths)
            self._to_leave[sequence.session] = sequence
            if sequence.resume_at is not None and not lengths:
                self._expected.add(sequence)
        self._go_on()

    def repeat(self, sequence: TokenSequence) -> None:
        """Signal the session's last phase again, after its KV has changed."""
        resume_in_s = None if sequence.resume_at is None else max(0.0, sequence.resume_at - self._clock())
        if sequence.phase is not Phase.COMPUTE:
            gap = self._gaps.get(sequence.session)
            self.signal(sequence, sequence.phase, resume_in_s, gap.lengths if gap else ())

    def forget(self, sequence: TokenSequence) -> None:
        """The session gets a turn, or is closed."""
        self._stay(sequence)
        self._gaps.pop(sequence.session, None)
        self._wanted.remove(sequence)
        self._expected.remove(sequence)

    def rest(self) -> None:
        """Begin no more moves, whatever is signalled: the engine is about to stop."""
        self._listens = False
        for sequence in (*self._placement.resident.values(), *self._placement.away.values()):
            self.forget(sequence)

    def tick(self) -> None:
        """Go on with every session that waits for its time or for room. Costs nothing while neither has come."""
        if self._placement.changed or self._clock() >= self._next_time:
            self._go_on()

    def next_alarm(self) -> float | None:
        """When `tick` must be called again even if nothing else happens; a time of the clock, None: never."""
        if self._placement.changed:
            return self._clock()
        alarm = self._next_time
        return None if alarm == math.inf else alarm

    @property
    def _next_time(self) -> float:
        return min(self._expected.next_start, self._retry_at, self._looks[0][0] if self._looks else math.inf)

    def _go_on(self) -> None:
        now, placement = self._clock(), self._placement
        placement.changed = False
        placement.forget_order()
        for sequence in placement.take_moved():
            self._expected.note_moved(sequence)
            self._wanted.note_moved(sequence)
            evicted = sequence.session in self._again and sequence.session in placement.away
            if sequence.session in self._stuck or sequence.session in self._leaving or evicted:
                self._stay(sequence)
                self._to_leave[sequence.session] = sequence
        while self._looks and self._looks[0][0] <= now:
            _, sequence = self._again[self._looks[0][1]]
            self._stay(sequence)
            self._to_leave[sequence.session] = sequence
        self._want_due(now)
        expected = len(self._expected)
        self._send_all_away(now)
        if len(self._expected) > expected:
            self._want_due(now)
        self._prefetch_all()
        has_more = self._to_leave or self._leaving or self._stuck or self._wanted
        self._retry_at = now + RETRY_S if has_more else math.inf

    def _want_due(self, now: float) -> None:
        meter = self._placement.meter
        block_s = meter.seconds(1, MoveKind.FROM_DISK), meter.seconds(1, MoveKind.IN)
        busy_s = self._wanted.restore_s(block_s)
        for sequence in self._expected.take_due(now, self._placement.margin_s, block_s, busy_s=busy_s):
            self._want(sequence)

    def _stay(self, sequence: TokenSequence) -> None:
        """Send it away no more."""
        for sessions in (self._to_leave, self._leaving, self._stuck):
            sessions.pop(sequence.session, None)
        if found := self._again.pop(sequence.session, None):
            del self._looks[bisect_left(self._looks, (found[0], sequence.session))]

    def _look_again(self, sequence: TokenSequence, at: float) -> None:
        self._again[sequence.session] = at, sequence
        insort(self._looks, (at, sequence.session))

    def _want(self, sequence: TokenSequence) -> None:
        self._stay(sequence)
        was_moving = sequence.moving
        self._tiers.head_back(sequence)
        if sequence.moving is not was_moving:
            self._placement.note_placed(sequence)
        if sequence.session in self._placement.away:
            self._wanted.add(sequence)
        else:
            self._note_back(sequence)

    def _note_back(self, sequence: TokenSequence) -> None:
        """It is on the device for a return that may come much later: then it leaves again."""
        if (gap := self._gaps.get(sequence.session)) and gap.lengths:
            now = self._clock()
            late_at = gap.over_at(now, 1 - EARLY_WAITS)
            self._look_again(sequence, now + LAPSE_S if late_at is None else min(late_at, now + LAPSE_S))

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
            self._note_back(sequence)
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
        """Offload a session that waits by one tier: to the host, and from there to disk if it is `idle`, or has waited
        for long while more than half of the host is taken. False: it would be back before the move was done, or may be;
        or it is larger than the whole host.
        """
        gap, blocks = self._gaps.get(sequence.session) or Gap(now), self._tiers.cache.pool.kept_for(sequence.computed)
        seconds = self._placement.meter.seconds
        if sequence.tier is Tier.DEVICE:
            if sequence.held_count > self._host.num_blocks:
                return False
            move_s = seconds(blocks, MoveKind.OUT, MoveKind.IN)
            if gap.lengths and (leave_at := gap.leave_at(now, move_s)) > now:
                self._look_again(sequence, leave_at)
                return False
            if not gap.lengths and sequence.return_time - now < move_s:
                return False
        if gap.lengths:
            sequence.resume_at = gap.over_at(now, EARLY_WAITS)
            self._expected.remove(sequence)
            if sequence.resume_at is not None:
                self._expected.add(sequence)
        if sequence.tier is Tier.DEVICE and not self._park(sequence):
            self._stuck[sequence.session] = sequence
            self._no_room = min(self._no_room, sequence.uncopied)
            if self._again_at == math.inf:
                self._again_at, self._host_changes = now + RETRY_S, self._host.changes
        if sequence.tier is Tier.HOST:
            by_disk_s = seconds(blocks, MoveKind.TO_DISK, MoveKind.FROM_DISK, MoveKind.IN)
            lasts, is_short = now - gap.began >= LAPSE_S, 2 * self._host.available < self._host.num_blocks
            if (sequence.phase is Phase.IDLE or (lasts and is_short)) and sequence.return_time - now >= by_disk_s:
                self._placement.save(sequence)
            elif sequence.phase is Phase.IO_WAIT and self._placement.disk_blocks:
                self._look_again(sequence, now + LAPSE_S if lasts else gap.began + LAPSE_S)
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


class ShutdownFlush:
    """Takes sessions to disk, the first ones first, until `until` on the placement's clock.

    Room on disk is promised in their order, so none loses its file for a later session. A session with a turn
    waits for the turn's end. KV goes over the host, which may be smaller than the device: as files are written, the
    host gets room for the next ones.
    """

    def __init__(self, placement: Placement, sequences: Sequence[TokenSequence], until: float) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._until = until
        self._sequences = sequences
        promised: dict[TokenSequence, None] = {}  # those that have room on disk, also once they are closed
        self._unpromised: list[TokenSequence] = []
        room, pool, host = placement.disk_blocks, placement.tiers.cache.pool, placement.tiers.cache.host
        for sequence in sequences:  # those whose files fit together
            tokens = sequence.computed if sequence.turn is None else len(sequence.tokens)
            blocks = max(pool.kept_for(tokens), sequence.disk_blocks)
            if blocks <= room and (blocks <= host.num_blocks or _is_kept(sequence)):  # it goes over the host
                room -= blocks
                promised[sequence] = None
            else:
                self._unpromised.append(sequence)
        placement.promised = promised
        self._left = dict(promised)
        """Without those whose KV is on disk, or will not be in time."""
        self._in_turns = list(promised)
        self._aside = set[TokenSequence]()
        """Those for which the host has no room, unless a turn ends that holds some of it."""
        self._starts = Counter[TokenSequence]()

    @property
    def kept(self) -> list[TokenSequence]:
        """Sessions all of whose KV is on disk."""
        return [sequence for sequence in self._sequences if sequence.computed and _is_kept(sequence)]

    @property
    def lost(self) -> list[TokenSequence]:
        """Sessions that have KV which is not on disk."""
        return [sequence for sequence in self._sequences if not _is_kept(sequence)]

    def go_on(self) -> bool:
        """Go on with what has become possible: a move has ended, or a turn. Returns whether nothing more follows.

        While one waits for room on the host, others begin only if they will give it some. If none does and nothing
        moves, it is set aside.
        """
        in_turns = [sequence for sequence in self._in_turns if sequence.turn is not None]
        if len(in_turns) < len(self._in_turns):
            self._aside.clear()
        self._in_turns = in_turns
        while True:
            under_way = 0
            waiting: TokenSequence | None = None
            for sequence in tuple(self._left):
                if under_way * self._tiers.block_bytes >= UNDER_WAY_BYTES:
                    break
                if sequence.turn is not None or sequence in self._aside:
                    continue
                blocks = self._tiers.cache.pool.kept_for(sequence.computed)
                if _is_kept(sequence):
                    del self._left[sequence]
                elif sequence.moving in (None, Tier.TO_DEVICE) and (sequence.tier is Tier.HOST or waiting is None):
                    if not self._has_time(sequence, under_way + blocks):
                        del self._left[sequence]
                    elif self._finds_no_room(sequence):
                        waiting = sequence
                under_way += blocks if sequence.moving is not None else 0
            if waiting is None or self._tiers.in_flight:
                return not (under_way or in_turns or waiting)
            self._aside.add(waiting)

    def _has_time(self, sequence: TokenSequence, blocks: int) -> bool:
        """Whether it would be on disk in time, as the last of so many `blocks`."""
        seconds, left = self._placement.meter.seconds, self._until - self._placement.clock()
        comes = seconds(sequence.disk_blocks, MoveKind.FROM_DISK) if sequence.tier is Tier.DISK else 0.0
        return comes + seconds(sequence.uncopied, MoveKind.OUT) + seconds(blocks, MoveKind.TO_DISK) <= left

    def _finds_no_room(self, sequence: TokenSequence) -> bool:
        """Take it one tier down; a file that a client has sent first comes back up. Returns whether the host has no
        room for it.
        """
        if sequence.moving is Tier.TO_DEVICE:
            self._tiers.cancel_move(sequence)
        no_room = False
        if sequence.tier in (Tier.DISK, Tier.DEVICE) and self._starts[sequence] < STARTS:
            begin = self._tiers.load if sequence.tier is Tier.DISK else self._tiers.park
            if not begin(sequence):
                needed = sequence.disk_blocks if sequence.tier is Tier.DISK else sequence.uncopied
                self._make_host_room(sequence, needed)
                no_room = not begin(sequence)
            self._starts[sequence] += not no_room
        if sequence.tier is Tier.HOST:
            self._placement.save(sequence)
        self._placement.refile(sequence)
        return no_room

    def _make_host_room(self, sequence: TokenSequence, missing: int) -> None:
        """Free host blocks for the session: copies of what the device or a file has too, then KV that no file will
        keep.
        """
        host = self._tiers.cache.host
        for other in (*self._placement.resident.values(), *self._placement.active.values()):
            if host.available < missing and other.blocks and other.moving is None and other is not sequence:
                self._tiers.cache.release_copies(other, 0)
                self._placement.note_placed(other)
        for other in self._sequences:
            if host.available < missing and other.tier is Tier.HOST and other.moving is None and _is_kept(other):
                self._placement.save(other)
        while self._unpromised and host.available < missing:
            other = self._unpromised.pop()
            if other.tier is Tier.HOST and other.turn is None:
                self._placement.drop(other)


def _is_kept(sequence: TokenSequence) -> bool:
    return not sequence.computed or (sequence.disk_tokens >= sequence.computed and not sequence.sent)
