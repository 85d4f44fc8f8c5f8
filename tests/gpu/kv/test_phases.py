"""When KV leaves and comes back, by what clients say, and on a link and a disk that take their time."""

import heapq

import pytest

from app.domain.values import KVPolicy, Phase, Tier
from app.gpu.kv.ranking import LAPSE_S
from app.gpu.state.moves import Moved, MoveKind
from tests.gpu.kv.tiering import BLOCK_SIZE, Bench, tier_of


def test_ready_turns_a_move_round() -> None:
    bench = Bench()
    sequence = bench.session(12)
    bench.phases.signal(sequence, Phase.IO_WAIT, None)
    assert tier_of(sequence) is Tier.TO_HOST
    bench.phases.signal(sequence, Phase.READY, None)
    assert tier_of(sequence) is Tier.DEVICE


def test_a_gap_shorter_than_the_move_is_not_worth_one() -> None:
    bench = Bench()
    slow = bench.session(40)
    bench.phases.signal(slow, Phase.IO_WAIT, None)
    for move in bench.orders():
        bench.placement.meter.add(move, Moved(move.number, 2.0))
    other = bench.session(20)
    bench.phases.signal(other, Phase.IO_WAIT, 0.5)
    assert tier_of(other) is Tier.DEVICE
    assert bench.orders() == []


SHORT = (0.1,) * 14 + (100.0, 120.0)
"""Lengths of waits, nearly all of which end before KV could move."""


def slow_bench() -> Bench:
    """Three blocks take 0.6 s to the host, until other moves are measured."""
    bench = Bench()
    bench.phases.signal(slow := bench.session(40), Phase.IO_WAIT, None)
    for move in bench.orders():
        bench.complete(Moved(move.number, 2.0))
    bench.close(slow)
    return bench


def test_a_wait_that_nearly_always_ends_at_once_moves_nothing_until_it_lasts() -> None:
    bench = slow_bench()
    sequence = bench.session(12)
    bench.phases.signal(sequence, Phase.IO_WAIT, 0.1, SHORT)
    assert bench.orders() == []
    bench.begin_turn(sequence)
    assert bench.orders() == [], "the answer came first"
    sequence.turn = None
    bench.placement.end_turn(sequence)
    bench.phases.signal(sequence, Phase.IO_WAIT, 0.1, SHORT)
    assert bench.tick(0.09) == []
    bench.tick(0.02)
    assert tier_of(sequence) is Tier.HOST, "it is one of the long ones"
    bench.overwrite_device()
    bench.tick(99.0)
    assert tier_of(sequence) is Tier.HOST
    bench.tick(0.9)
    assert tier_of(sequence) is Tier.DEVICE, "100 s after the call"
    bench.tick(LAPSE_S + 1)
    assert tier_of(sequence) is Tier.HOST, "it was too early"
    assert bench.tick(1000.0) == [], "it is longer than all before"


def test_a_wait_of_which_all_are_long_leaves_at_once_and_turns_round_for_its_answer() -> None:
    bench = slow_bench()
    sequence = bench.session(12)
    bench.phases.signal(sequence, Phase.IO_WAIT, 5.0, (5.0, 6.0))
    assert tier_of(sequence) is Tier.TO_HOST
    bench.begin_turn(sequence)
    assert tier_of(sequence) is Tier.DEVICE


@pytest.mark.parametrize(("host", "tier"), [(5, Tier.DISK), (32, Tier.HOST)])
def test_who_waits_for_long_goes_on_to_disk_if_the_host_fills(host: int, tier: Tier) -> None:
    bench = Bench(host=host)
    sequence = bench.session(12, Phase.IO_WAIT)
    bench.tick(LAPSE_S - 1)
    assert tier_of(sequence) is Tier.HOST
    bench.tick(2.0)
    assert tier_of(sequence) is tier


def test_nobody_loses_kv_for_one_that_nobody_waits_for_yet() -> None:
    bench = Bench(device=4, host=3, disk=0)
    returns = bench.session(12, Phase.IO_WAIT, 5.0)
    assert tier_of(returns) is Tier.HOST
    stays = bench.session(12)
    bench.now = 105.0
    bench.tick()
    assert tier_of(stays) is Tier.DEVICE
    assert (tier_of(returns), bench.placement.counts.dropped) == (Tier.HOST, 0)


def test_other_policies_do_not_listen_and_who_is_larger_than_the_host_is_not_tried_again() -> None:
    for bench, wait_s in ((Bench(policy=KVPolicy.LRU), 9.0), (Bench(policy=KVPolicy.NONE), 9.0), (Bench(host=2), None)):
        sequence = bench.session(10)
        bench.phases.signal(sequence, Phase.IO_WAIT, wait_s)
        assert tier_of(sequence) is Tier.DEVICE
        bench.tick()
        assert bench.phases.next_alarm() is None
        bench.begin_turn(sequence)
        bench.placement.write_behind([sequence])
        assert bench.orders() == []


def test_lru_sends_the_longest_idle_away_and_signal_the_one_that_returns_last() -> None:
    for policy, expected in ((KVPolicy.LRU, 0), (KVPolicy.SIGNAL, 1)):
        bench = Bench(device=9, policy=policy)
        sessions = [bench.session(12) for _ in range(3)]
        for sequence, return_at in zip(sessions, (120.0, 190.0, 150.0), strict=True):
            sequence.phase, sequence.resume_at = Phase.IO_WAIT, return_at
        bench.make_room(2)
        assert [move.session for move in bench.orders()] == [sessions[expected].session]


def test_who_is_idle_leaves_before_who_waits_and_that_one_before_who_computes() -> None:
    bench = Bench(device=9)
    computes, idle, waits = sessions = [bench.session(12) for _ in range(3)]
    for sequence, phase in zip(sessions, (Phase.COMPUTE, Phase.IDLE, Phase.IO_WAIT), strict=True):
        sequence.phase = phase
    bench.make_room(5)
    assert [move.session for move in bench.orders()] == [idle.session, waits.session]
    assert tier_of(computes) is Tier.DEVICE


def test_a_host_that_is_full_sends_the_longest_away_to_disk() -> None:
    bench = Bench(device=16, host=6)
    first, second, third = (bench.session(12) for _ in range(3))
    for sequence in (first, second, third):
        bench.signal(sequence, Phase.IO_WAIT)
    assert [s.tier for s in (first, second, third)] == [Tier.DISK, Tier.HOST, Tier.HOST]


def test_who_finds_no_room_on_the_host_leaves_when_there_is_some() -> None:
    bench = Bench(device=16, host=3, disk=0)
    first, large, small = bench.session(12), bench.session(12, first_token=1), bench.session(8, first_token=2)
    for sequence in (first, large, small):
        bench.signal(sequence, Phase.IO_WAIT)
    assert [s.tier for s in (first, large, small)] == [Tier.HOST, Tier.DEVICE, Tier.DEVICE]
    bench.tiers.truncate(first, 4)
    bench.signal(first, Phase.IO_WAIT)
    assert [tier_of(s) for s in (first, large, small)] == [Tier.HOST, Tier.DEVICE, Tier.HOST]
    bench.close(small)
    bench.close(first)
    bench.tick()
    assert tier_of(large) is Tier.HOST


def test_after_a_failed_write_the_disk_rests_for_ten_seconds() -> None:
    bench = Bench(device=16, host=3)
    away, stays = bench.session(12, Phase.IO_WAIT), bench.session(12, first_token=1)
    bench.placement.save(away)
    bench.finish(error="No space left on device")
    bench.signal(stays, Phase.IO_WAIT)
    assert (tier_of(away), tier_of(stays)) == (Tier.HOST, Tier.DEVICE)
    assert bench.tick(9.0) == []
    bench.tick(2.0)
    assert (tier_of(away), tier_of(stays)) == (Tier.DISK, Tier.HOST)


def test_a_rewind_leaves_the_signal_in_force() -> None:
    bench = Bench()
    sequence = bench.session(12)
    bench.phases.signal(sequence, Phase.IO_WAIT, None)
    bench.tiers.truncate(sequence, 6)
    bench.placement.end_turn(sequence)
    bench.phases.repeat(sequence)
    bench.finish()
    assert tier_of(sequence) is Tier.HOST


class SlowMover:
    """Carries out a bench's moves in its time, one after another each way."""

    def __init__(self, bench: Bench, *, link_s: float = 0.1, disk_s: float = 0.0) -> None:
        self._bench = bench
        self._block_s = dict.fromkeys((MoveKind.OUT, MoveKind.IN), link_s)
        self._block_s |= dict.fromkeys((MoveKind.TO_DISK, MoveKind.FROM_DISK), disk_s)
        self._free_at: dict[MoveKind, float] = {}
        self._ends: list[tuple[float, int, float]] = []

    def run(self, until: float) -> None:
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

    def measure(self) -> None:
        """Have a session go all the way down and come back, so that all speeds are known."""
        bench = self._bench
        sequence = bench.session(12)
        bench.phases.signal(sequence, Phase.IDLE, None)
        self.run(bench.now + 100)
        bench.overwrite_device()
        bench.phases.signal(sequence, Phase.READY, None)
        self.run(bench.now + 100)


def test_sessions_that_return_together_share_the_link_and_are_all_back_in_time() -> None:
    bench = Bench(device=40)
    mover = SlowMover(bench)
    mover.measure()
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
    mover = SlowMover(bench, disk_s=0.5)
    mover.measure()
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
    mover = SlowMover(bench, disk_s=2.0)
    mover.measure()
    sequence = bench.session(12)
    bench.phases.signal(sequence, Phase.IDLE, 11.0)
    mover.run(bench.now + 5)
    assert tier_of(sequence) is Tier.HOST


def test_prefetches_begin_earlier_by_two_steps_of_the_engine_and_no_longer_when_steps_are_short_again() -> None:
    """Between the order and the arrival the engine may be busy with a step each."""
    bench = Bench()
    mover = SlowMover(bench)
    mover.measure()
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
    mover = SlowMover(bench)
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
        bench.signal(many[-1], Phase.IO_WAIT, 10.0)
    assert tier_of(small) is Tier.DEVICE
    for sequence in many:
        bench.signal(sequence, Phase.READY)
        bench.tick()
    assert [tier_of(each) for each in many].count(Tier.DEVICE) == 3
    assert tier_of(small) is Tier.DEVICE
