"""What planning costs depends on what changes, not on how many sessions there are: counted in calls, not in seconds."""

from __future__ import annotations

from functools import partial

import pytest

from app.domain.values import Phase, Tier
from app.gpu.kv_tiers.phases import BLOCKS_A_LOOK, TRIED
from app.gpu.state.sequence import TokenSequence
from tests.gpu.kv_tiers.tiering import BLOCK_SIZE, Bench, calls_of, tier_of


def crowded(wanted: int, later: int) -> tuple[Bench, list[TokenSequence]]:
    """A device that a session which runs has to itself; `wanted` sessions are due, `later` ones are not."""
    bench = Bench(device=16, host=4 * (wanted + later))
    sessions = []
    for number in range(wanted + later):
        session = bench.session(2 * BLOCK_SIZE, first_token=number)
        bench.phases.signal(session, Phase.IO_WAIT, 1.0 if number < wanted else 1000.0)
        bench.finish()
        sessions.append(session)
    bench.begin_turn(bench.session(16 * BLOCK_SIZE, first_token=-1))
    bench.now += 10
    bench.phases.tick()
    assert {tier_of(each) for each in sessions} == {Tier.HOST}
    return bench, sessions


@pytest.mark.parametrize("what", ["a look without news", "a word of one session"])
def test_a_look_costs_the_same_beside_ten_times_as_many_sessions(what: str) -> None:
    counts = []
    for number in (40, 400):
        bench, sessions = crowded(number, number)
        if what == "a look without news":
            bench.placement.changed = True
            counts.append(calls_of(bench.phases.tick))
        else:
            counts.append(calls_of(partial(bench.phases.signal, sessions[-1], Phase.IO_WAIT, 900.0)))
    few, many = counts
    assert many < 1.2 * few


@pytest.mark.parametrize("what", ["a look without news", "a word of one session"])
def test_sessions_that_find_no_room_on_the_host_cost_a_look_nothing(what: str) -> None:
    counts = []
    for number in (40, 400):
        bench = Bench(device=2 * number, host=0, disk=0)
        sessions = [bench.session(2 * BLOCK_SIZE, first_token=each) for each in range(number)]
        for sequence in sessions:
            bench.phases.signal(sequence, Phase.IO_WAIT, 1000.0)
        bench.phases.tick()
        bench.placement.take_placed()
        if what == "a look without news":
            bench.placement.changed = True
            counts.append(calls_of(bench.phases.tick))
        else:
            counts.append(calls_of(partial(bench.phases.signal, sessions[-1], Phase.IO_WAIT, 900.0)))
        assert bench.placement.take_placed() == []
    few, many = counts
    assert many < 1.2 * few


def test_room_for_a_small_session_is_used_although_larger_ones_come_first() -> None:
    bench = Bench(device=16, host=64)
    large = []
    for number in range(TRIED - 1):
        large.append(bench.session(5 * BLOCK_SIZE, first_token=number))
        bench.phases.signal(large[-1], Phase.IO_WAIT, 1.0)
        bench.finish()
    small = bench.session(2 * BLOCK_SIZE, first_token=-1)
    bench.phases.signal(small, Phase.IO_WAIT, 2.0)
    bench.finish()
    bench.begin_turn(bench.session(13 * BLOCK_SIZE, first_token=-2))
    bench.now += 10
    bench.phases.tick()
    assert (tier_of(small), {tier_of(each) for each in large}) == (Tier.DEVICE, {Tier.HOST})


def test_a_look_begins_a_part_of_many_prefetches_and_the_next_goes_on() -> None:
    count, blocks = 10, BLOCKS_A_LOOK // 4
    bench = Bench(device=count * blocks, host=count * blocks)
    sessions = [bench.session(blocks * BLOCK_SIZE, first_token=number) for number in range(count)]
    for sequence in sessions:
        bench.phases.signal(sequence, Phase.IO_WAIT, 1000.0)
    bench.finish()
    bench.overwrite_device()
    bench.now += 1000
    bench.phases.tick()
    assert [tier_of(each) for each in sessions].count(Tier.TO_DEVICE) == 4
    assert bench.phases.next_alarm() == bench.now
    bench.phases.tick()
    assert [tier_of(each) for each in sessions].count(Tier.TO_DEVICE) == 8
    bench.finish()
    assert {tier_of(each) for each in sessions} == {Tier.DEVICE}


def test_those_who_give_way_look_for_room_on_a_full_host_once() -> None:
    counts = []
    for number in (20, 200):
        bench = Bench(device=2 * number, host=2 * number, disk=4 * number)
        for each in range(number):
            away = bench.session(2 * BLOCK_SIZE, first_token=each)
            bench.tiers.park(away)
            bench.placement.refile(away)
            bench.finish()
        for each in range(number):
            bench.session(2 * BLOCK_SIZE, first_token=-1 - each)
        turn = bench.session(0)
        bench.begin_turn(turn)
        counts.append(calls_of(partial(bench.placement.eviction.make_room, 2 * number, turn)))
        assert bench.orders()
    few, many = counts
    assert many < 15 * few
