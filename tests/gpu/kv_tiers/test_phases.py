"""When KV leaves and comes back, by what clients say."""

from __future__ import annotations

import pytest

from app.domain.values import KVPolicy, Phase, SessionId, Tier
from app.gpu.kv.moves import Moved, MoveKind
from app.gpu.state.sequence import TokenSequence
from tests.gpu.kv_tiers.tiering import BLOCK_BYTES, Bench, tier_of


def test_it_comes_back_a_margin_before_the_session_does() -> None:
    bench = Bench()
    sequence = bench.session(10)
    bench.phases.signal(sequence, Phase.IO_WAIT, 10.0)
    bench.finish()
    assert tier_of(sequence) is Tier.HOST
    bench.overwrite_device()
    alarm = bench.phases.next_alarm()
    assert alarm is not None
    assert 109.8 < alarm < 109.9
    bench.now = alarm - 0.01
    bench.phases.tick()
    assert tier_of(sequence) is Tier.HOST
    bench.now = alarm
    bench.phases.tick()
    bench.finish()
    assert tier_of(sequence) is Tier.DEVICE


def test_a_gap_shorter_than_the_move_is_not_worth_one() -> None:
    bench = Bench()
    slow = bench.session(40)
    bench.phases.signal(slow, Phase.IO_WAIT, None)
    for move in bench.orders():
        bench.placement.meter.add(move, _took(move.number, seconds=2.0))
    other = bench.session(20)
    bench.phases.signal(other, Phase.IO_WAIT, 0.5)
    assert tier_of(other) is Tier.DEVICE
    assert bench.orders() == []


def test_the_earliest_return_comes_back_first_when_there_is_room_for_one() -> None:
    bench = Bench(device=4)
    late = bench.session(12)
    bench.phases.signal(late, Phase.IO_WAIT, 50.0)
    bench.finish()
    soon = bench.session(12)
    bench.phases.signal(soon, Phase.IO_WAIT, 40.0)
    bench.finish()
    bench.overwrite_device()
    bench.now = 149.95
    bench.phases.tick()
    assert [move.session for move in bench.orders()] == [soon.session]


def test_sessions_that_are_about_to_return_are_not_sent_away_for_one_that_returns_later() -> None:
    looks: list[float] = []

    def headroom() -> int:
        looks.append(bench.now)
        return 0

    bench = Bench(device=4, headroom=headroom)
    waiting = bench.session(12)
    bench.phases.signal(waiting, Phase.IO_WAIT, 5.0)
    bench.finish()
    ready = bench.session(12)
    bench.phases.signal(ready, Phase.READY, None)
    bench.now = 105.0
    bench.phases.tick()
    bench.finish()
    assert tier_of(ready) is Tier.DEVICE
    assert tier_of(waiting) is Tier.HOST


def test_nobody_loses_kv_for_one_that_nobody_waits_for_yet() -> None:
    bench = Bench(device=4, host=3, disk=0)
    returns = bench.session(12)
    bench.phases.signal(returns, Phase.IO_WAIT, 5.0)
    bench.finish()
    assert tier_of(returns) is Tier.HOST
    stays = bench.session(12)
    bench.now = 105.0
    bench.phases.tick()
    bench.finish()
    assert tier_of(stays) is Tier.DEVICE
    assert (tier_of(returns), bench.placement.lower.dropped) == (Tier.HOST, 0)


def test_idle_goes_down_to_disk_and_ready_brings_it_all_the_way_back() -> None:
    bench = Bench()
    sequence = bench.session(10)
    bench.phases.signal(sequence, Phase.IDLE, None)
    assert [move.kind for move in bench.finish()] == [MoveKind.OUT, MoveKind.TO_DISK]
    assert tier_of(sequence) is Tier.DISK
    assert bench.host.owned == 0
    bench.overwrite_device()
    bench.phases.signal(sequence, Phase.READY, None)
    assert [move.kind for move in bench.finish()] == [MoveKind.FROM_DISK, MoveKind.IN]
    assert tier_of(sequence) is Tier.DEVICE


@pytest.mark.parametrize("policy", [KVPolicy.LRU, KVPolicy.NONE])
def test_other_policies_do_not_listen(policy: KVPolicy) -> None:
    bench = Bench(policy=policy)
    sequence = bench.session(10)
    bench.phases.signal(sequence, Phase.IO_WAIT, 10.0)
    assert tier_of(sequence) is Tier.DEVICE
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
        bench.placement.eviction.make_room(2, TokenSequence(SessionId("asks"), b""))
        assert [move.session for move in bench.orders()] == [sessions[expected].session]


def test_a_guaranteed_session_never_gives_way() -> None:
    bench = Bench(device=6)
    sequence = bench.session(12)
    sequence.guaranteed = True
    other = bench.session(12)
    bench.placement.eviction.make_room(6, TokenSequence(SessionId("asks"), b""), or_some=True)
    bench.finish()
    assert (sequence.tier, other.tier) == (Tier.DEVICE, Tier.HOST)


def test_a_host_that_is_full_sends_the_longest_away_to_disk() -> None:
    bench = Bench(device=16, host=6)
    first, second, third = (bench.session(12) for _ in range(3))
    for sequence in (first, second, third):
        bench.phases.signal(sequence, Phase.IO_WAIT, None)
        bench.finish()
    assert [s.tier for s in (first, second, third)] == [Tier.DISK, Tier.HOST, Tier.HOST]


def test_who_finds_no_room_on_the_host_leaves_when_there_is_some() -> None:
    bench = Bench(device=16, host=3, disk=0)
    first, large, small = bench.session(12), bench.session(12, first_token=1), bench.session(8, first_token=2)
    for sequence in (first, large, small):
        bench.phases.signal(sequence, Phase.IO_WAIT, None)
    bench.finish()
    assert [s.tier for s in (first, large, small)] == [Tier.HOST, Tier.DEVICE, Tier.DEVICE]
    bench.tiers.truncate(first, 4)
    bench.phases.signal(first, Phase.IO_WAIT, None)
    bench.finish()
    assert [tier_of(s) for s in (first, large, small)] == [Tier.HOST, Tier.DEVICE, Tier.HOST]
    bench.close(small)
    bench.close(first)
    bench.phases.tick()
    bench.finish()
    assert tier_of(large) is Tier.HOST


def test_who_finds_no_room_on_the_host_looks_for_disk_that_can_be_written_again() -> None:
    bench = Bench(device=16, host=3)
    away, stays = bench.session(12), bench.session(12, first_token=1)
    bench.phases.signal(away, Phase.IO_WAIT, None)
    bench.finish()
    bench.placement.lower.save_failed()
    bench.phases.signal(stays, Phase.IO_WAIT, None)
    bench.finish()
    assert (tier_of(away), tier_of(stays)) == (Tier.HOST, Tier.DEVICE)
    bench.now += 11.0
    bench.phases.tick()
    bench.finish()
    assert (tier_of(away), tier_of(stays)) == (Tier.DISK, Tier.HOST)


def test_who_finds_no_room_on_the_host_shares_what_comes_there() -> None:
    bench = Bench(device=16, host=3, disk=0)
    first, twin = bench.session(8), bench.session(9)
    twin.hashes[:2] = first.hashes[:2]
    twin.namespace = first.namespace
    bench.begin_turn(first)
    other = bench.session(8, first_token=1)
    for sequence in (other, twin):
        bench.phases.signal(sequence, Phase.IO_WAIT, None)
        bench.finish()
    assert (tier_of(other), tier_of(twin)) == (Tier.HOST, Tier.DEVICE)
    bench.close(other)
    first.turn = None
    bench.placement.end_turn(first)
    bench.tiers.park(first)
    bench.finish()
    bench.now += 1.0
    bench.phases.tick()
    bench.finish()
    assert tier_of(twin) is Tier.HOST


def test_without_a_lower_tier_that_has_room_a_session_that_must_go_loses_its_kv() -> None:
    bench = Bench(device=6, host=2, disk=0)
    sequence = bench.session(12)
    bench.placement.eviction.make_room(6, TokenSequence(SessionId("asks"), b""), or_some=True)
    assert tier_of(sequence) is None
    assert bench.placement.counts().dropped == 1


def test_traffic_counts_bytes() -> None:
    bench = Bench()
    sequence = bench.session(10)
    bench.phases.signal(sequence, Phase.IO_WAIT, None)
    bench.finish()
    bench.overwrite_device()
    bench.phases.signal(sequence, Phase.READY, None)
    bench.finish()
    assert sequence.traffic.bytes_out == sequence.traffic.bytes_in == 3 * BLOCK_BYTES
    assert sequence.traffic.restores == 1


def _took(number: int, seconds: float) -> Moved:
    return Moved(number, seconds)


def test_making_room_for_a_session_never_takes_from_that_session() -> None:
    """Whoever gives way needs the host blocks of the one that it gives way to."""
    bench = Bench(device=7, host=7, disk=2)
    returning = bench.session(8)
    bench.phases.signal(returning, Phase.IDLE, None)
    bench.finish()
    bench.tiers.files.load(returning)
    bench.finish()
    stays_away = bench.session(12)
    bench.phases.signal(stays_away, Phase.IO_WAIT, None)
    bench.finish()
    gives_way = bench.session(24)
    bench.overwrite_device()
    assert bench.placement.eviction.make_room(2, returning)
    assert tier_of(returning) is Tier.HOST
    assert tier_of(gives_way) is None


def test_a_disk_that_stays_full_costs_kv_and_not_the_server() -> None:
    bench = Bench(device=6, host=3, disk=32)
    away = bench.session(12)
    bench.phases.signal(away, Phase.IO_WAIT, None)
    bench.finish()
    resident = bench.session(12)
    for _ in range(3):
        if bench.placement.eviction.make_room(6, TokenSequence(SessionId("asks"), b""), or_some=True):
            break
        bench.finish(error="disk full")
    assert bench.device.available == 6
    assert tier_of(resident) is None
    assert tier_of(away) is Tier.HOST


def test_a_rewind_leaves_the_signal_in_force() -> None:
    bench = Bench()
    sequence = bench.session(12)
    bench.phases.signal(sequence, Phase.IO_WAIT, None)
    bench.tiers.truncate(sequence, 6)
    bench.placement.end_turn(sequence)
    bench.phases.repeat(sequence)
    bench.finish()
    assert tier_of(sequence) is Tier.HOST


def test_while_nothing_changes_those_who_wait_for_room_are_not_looked_at_again() -> None:
    bench, looks, blocking, waiting = one_waits_for_the_room_of_another()
    for _ in range(1000):
        bench.phases.tick()
    assert len(looks) == 1
    bench.close(blocking)
    assert bench.phases.next_alarm() == bench.now
    bench.phases.tick()
    bench.finish()
    assert tier_of(waiting) is Tier.DEVICE


def test_a_session_that_does_not_return_when_it_said_no_longer_keeps_others_out() -> None:
    bench, _, blocking, waiting = one_waits_for_the_room_of_another()
    bench.now += 20
    bench.phases.tick()
    assert bench.orders() == []
    bench.now += 10
    bench.phases.tick()
    bench.finish()
    assert (tier_of(blocking), tier_of(waiting)) == (Tier.HOST, Tier.DEVICE)


def one_waits_for_the_room_of_another() -> tuple[Bench, list[float], TokenSequence, TokenSequence]:
    """A session that is wanted back while one that is about to return has the device; each look at it is recorded."""
    looks: list[float] = []

    def headroom() -> int:
        looks.append(bench.now)
        return 0

    bench = Bench(device=4, headroom=headroom)
    waiting = bench.session(12)
    bench.phases.signal(waiting, Phase.IO_WAIT, None)
    bench.finish()
    bench.overwrite_device()
    blocking = bench.session(12)
    bench.phases.signal(blocking, Phase.READY, None)
    bench.now += 5
    bench.phases.signal(waiting, Phase.READY, None)
    return bench, looks, blocking, waiting
