"""When prefetches begin, on a link and a disk that take their time."""

from __future__ import annotations

import heapq

from app.domain.values import Phase, Tier
from app.gpu.kv.moves import Moved, MoveKind
from app.gpu.kv_tiers.victims import LAPSE_S
from app.gpu.state.sequence import TokenSequence
from tests.gpu.kv_tiers.tiering import BLOCK_SIZE, Bench, tier_of


class SlowMover:
    """Carries out a bench's moves in its time, one after another each way."""

    def __init__(self, bench: Bench, *, link_s: float, disk_s: float = 0.0) -> None:
        self._bench = bench
        self._block_s = {
            MoveKind.OUT: link_s,
            MoveKind.IN: link_s,
            MoveKind.TO_DISK: disk_s,
            MoveKind.FROM_DISK: disk_s,
        }
        self._free_at: dict[MoveKind, float] = {}
        self._ends: list[tuple[float, int, float]] = []

    def run(self, until: float) -> None:
        """Let time pass."""
        bench, phases = self._bench, self._bench.phases
        while bench.now < until:
            phases.tick()
            for move in bench.orders():
                seconds = self._block_s[move.kind] * max(len(move.source), len(move.target))
                end = max(bench.now, self._free_at.get(move.kind, 0.0)) + seconds
                self._free_at[move.kind] = end
                heapq.heappush(self._ends, (end, move.number, seconds))
            alarm = phases.next_alarm()
            bench.now = min([until, *(end for end, _, _ in self._ends), *([] if alarm is None else [alarm])])
            while self._ends and self._ends[0][0] <= bench.now:
                _, number, seconds = heapq.heappop(self._ends)
                bench.complete(Moved(number, seconds))

    def measure(self, sequence: TokenSequence) -> None:
        """Have a session go all the way down and come back, so that all speeds are known."""
        bench = self._bench
        bench.phases.signal(sequence, Phase.IDLE, None)
        self.run(bench.now + 100)
        bench.overwrite_device()
        bench.phases.signal(sequence, Phase.READY, None)
        self.run(bench.now + 100)


def test_sessions_that_return_together_share_the_link_and_are_all_back_in_time() -> None:
    bench = Bench(device=40)
    mover = SlowMover(bench, link_s=0.1)
    mover.measure(bench.session(12))
    start = bench.now
    sessions = [bench.session(12) for _ in range(6)]
    for number, sequence in enumerate(sessions):  # those that return last say so first
        bench.phases.signal(sequence, Phase.IO_WAIT, 20.0 - 0.01 * number)
    mover.run(start + 17.9)
    bench.overwrite_device()
    assert {tier_of(sequence) for sequence in sessions} == {Tier.HOST}
    for number, sequence in reversed(list(enumerate(sessions))):
        mover.run(start + 19.901 - 0.01 * number)
        assert tier_of(sequence) is Tier.DEVICE


def test_a_prefetch_from_disk_begins_earlier_by_the_time_that_reading_takes() -> None:
    bench = Bench()
    mover = SlowMover(bench, link_s=0.1, disk_s=0.5)
    mover.measure(bench.session(12))
    start = bench.now
    sequence = bench.session(12)
    bench.phases.signal(sequence, Phase.IDLE, 20.0)
    mover.run(start + 18.0)
    bench.overwrite_device()
    assert tier_of(sequence) is Tier.DISK
    mover.run(start + 19.901)
    assert tier_of(sequence) is Tier.DEVICE


def test_a_gap_too_short_for_the_disk_is_spent_on_the_host() -> None:
    bench = Bench()
    mover = SlowMover(bench, link_s=0.1, disk_s=2.0)
    mover.measure(bench.session(12))
    sequence = bench.session(12)
    bench.phases.signal(sequence, Phase.IDLE, 11.0)
    mover.run(bench.now + 5)
    assert tier_of(sequence) is Tier.HOST


def test_prefetches_begin_earlier_by_two_steps_of_the_engine_and_no_longer_when_steps_are_short_again() -> None:
    """Between the order and the arrival the engine may be busy with a step each."""
    bench = Bench()
    mover = SlowMover(bench, link_s=0.1)
    mover.measure(bench.session(12))
    for long_ago, earliest in ((0, 1.1), (400, 0.1)):
        bench.placement.note_step(0.5)
        for _ in range(long_ago):
            bench.placement.note_step(0.0)
        start, sequence = bench.now, bench.session(12)
        bench.phases.signal(sequence, Phase.IO_WAIT, 20.0)
        mover.run(start + 20 - earliest - 0.7)
        bench.overwrite_device()
        assert tier_of(sequence) is Tier.HOST
        mover.run(start + 20 - earliest + 0.001)
        assert tier_of(sequence) is Tier.DEVICE


def test_an_idle_engine_tries_again_when_time_alone_has_made_room() -> None:
    bench = Bench(device=6)
    mover = SlowMover(bench, link_s=0.1)
    late, wanted = bench.session(12, first_token=1), bench.session(12, first_token=2)
    bench.phases.signal(wanted, Phase.IO_WAIT, 10.0)
    mover.run(bench.now + 5)
    bench.overwrite_device()
    bench.phases.signal(late, Phase.IO_WAIT, 0.3)  # too soon to leave; it never comes
    fills = bench.session(8, first_token=3)
    bench.phases.signal(fills, Phase.READY, None)
    mover.run(bench.now + 10)
    assert tier_of(wanted) is Tier.HOST
    mover.run(bench.now + LAPSE_S)
    assert tier_of(wanted) is Tier.DEVICE


def test_who_floods_the_device_with_sessions_that_return_takes_room_from_itself() -> None:
    bench = Bench(device=12, host=64)
    small, many = bench.session(3 * BLOCK_SIZE), []
    small.tenant = "small"
    for number in range(6):
        many.append(bench.session(3 * BLOCK_SIZE, first_token=1 + number))
        many[-1].tenant = "flood"
        bench.phases.signal(many[-1], Phase.IO_WAIT, 10.0)
        bench.finish()
    assert tier_of(small) is Tier.DEVICE
    for sequence in many:
        bench.phases.signal(sequence, Phase.READY, None)
        bench.finish()
        bench.phases.tick()
        bench.finish()
    assert [tier_of(each) for each in many].count(Tier.DEVICE) == 3
    assert tier_of(small) is Tier.DEVICE


def test_in_one_look_a_flood_takes_no_more_of_another_tenant_than_both_then_have() -> None:
    bench = Bench(device=12, host=64)
    flood = [bench.session(3 * BLOCK_SIZE, first_token=50 + number) for number in range(4)]
    for sequence in flood:
        sequence.tenant = "flood"
        bench.phases.signal(sequence, Phase.IO_WAIT, 10.0)
        bench.finish()
    other = [bench.session(3 * BLOCK_SIZE, first_token=1 + number) for number in range(4)]
    for sequence in other:
        sequence.tenant = "other"
        bench.tiers.copy_out(sequence, 3)
    bench.finish()
    bench.now += 9.95
    bench.phases.tick()
    assert [tier_of(each) for each in flood].count(Tier.TO_DEVICE) == 2
    assert [tier_of(each) for each in other].count(Tier.DEVICE) == 2
