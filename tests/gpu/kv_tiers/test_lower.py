"""What goes to disk of a session that is paused: the passes that have ended, and no room for the one that has not."""

from __future__ import annotations

import pytest

from app.domain.values import Tier
from app.gpu.kv.moves import MoveKind
from app.gpu.state.sequence import TokenSequence
from tests.gpu.kv_tiers.tiering import BLOCK_SIZE, LENGTH, Bench, paused_on_host, tier_of


@pytest.mark.parametrize(("computed", "disk"), [(0, 4), (BLOCK_SIZE, 5)])
def test_half_a_pass_takes_no_room_on_disk_from_anybody(computed: int, disk: int) -> None:
    bench = Bench(disk=disk)
    older = bench.session(4 * BLOCK_SIZE)
    bench.bring_to(older, Tier.DISK)
    bench.placement.refile(older)
    paused = paused_on_host(bench, computed)
    assert len(paused.host_blocks) == LENGTH // BLOCK_SIZE
    assert bench.placement.lower.save(paused)
    moves = bench.finish()
    assert [move.kind for move in moves] == [MoveKind.TO_DISK] * bool(computed)
    assert tier_of(older) is Tier.DISK
    assert bench.placement.counts().dropped == 0
    assert bench.host.owned == 0
    assert bench.placement.lower.disk_used == 4 + computed // BLOCK_SIZE
    assert tier_of(paused) is (Tier.DISK if computed else None)


def test_a_session_that_has_only_half_a_pass_gets_no_file() -> None:
    bench = Bench(disk=4)
    paused = paused_on_host(bench, 0)
    assert bench.placement.lower.save(paused)
    assert bench.orders() == []
    assert paused.session not in bench.placement.lower.away
    assert paused.session not in bench.placement.lower._files
    bench.close(paused)
    assert bench.finish() == []


def on_disk(bench: Bench, blocks: int) -> TokenSequence:
    sequence = bench.session(blocks * BLOCK_SIZE)
    bench.bring_to(sequence, Tier.DISK)
    bench.placement.refile(sequence)
    return sequence


def test_files_give_way_to_what_must_have_the_disk_copies_and_the_oldest_first() -> None:
    bench = Bench(disk=32)
    older, newer, promised = (on_disk(bench, 4) for _ in range(3))
    copied = on_disk(bench, 2)
    promised.guaranteed = True
    bench.tiers.files.load(copied)
    bench.finish()
    lower = bench.placement.lower
    assert lower.disk_used == 14
    for blocks, left in ((1, 12), (3, 8), (1, 4), (100, 4), (1, 4)):
        lower.give_way(blocks)
        assert {move.kind for move in bench.finish()} <= {MoveKind.DELETE}
        assert lower.disk_used == left
    assert [tier_of(each) for each in (copied, older, newer, promised)] == [Tier.HOST, None, None, Tier.DISK]
    assert bench.placement.counts().dropped == 2


def test_clients_hear_of_what_gave_way_to_others() -> None:
    bench = Bench(host=12, disk=32)
    parked, loaded = bench.session(4 * BLOCK_SIZE), on_disk(bench, 4)
    bench.tiers.files.load(loaded)
    bench.tiers.copy_out(parked, 4)
    bench.finish()
    bench.placement.take_placed()
    assert not bench.placement.eviction.make_host_room(13)
    assert bench.placement.take_placed() == []
    assert bench.placement.eviction.make_host_room(8)
    assert bench.placement.take_placed() == [parked]
    assert bench.placement.eviction.make_host_room(12)
    assert bench.placement.take_placed() == [loaded]
    assert tier_of(loaded) is Tier.DISK
    bench.placement.lower.give_way(100)
    assert bench.placement.take_placed() == [loaded]
    assert tier_of(loaded) is None


def test_kv_of_a_turn_that_waits_goes_to_disk_for_a_turn_only() -> None:
    bench = Bench(host=8)
    waiting, returning, turn = bench.session(6 * BLOCK_SIZE), on_disk(bench, 4), on_disk(bench, 4)
    bench.tiers.park(waiting)
    bench.finish()
    bench.begin_turn(waiting)
    assert not bench.placement.eviction.make_host_room(4, returning)
    assert waiting.moving is None
    bench.begin_turn(turn)
    bench.placement.eviction.make_host_room(4, turn)
    assert waiting.moving is Tier.TO_DISK


def test_a_save_that_is_turned_round_is_no_room_to_wait_for() -> None:
    bench = Bench(device=16, host=8, disk=64)
    first, second = bench.session(4 * BLOCK_SIZE, first_token=1), bench.session(4 * BLOCK_SIZE, first_token=2)
    for each in (first, second):
        bench.tiers.park(each)
        bench.placement.refile(each)
        bench.finish()
    resident = [bench.session(4 * BLOCK_SIZE, first_token=10 + number) for number in range(2)]
    turn = bench.session(0)
    bench.begin_turn(turn)
    needed = bench.device.available + 4
    bench.placement.eviction.make_room(needed, turn)
    assert (first.moving, second.moving) == (Tier.TO_DISK, None)
    bench.begin_turn(first)
    bench.placement.forget_order()
    bench.placement.eviction.make_room(needed, turn)
    assert (first.moving, second.moving) == (None, Tier.TO_DISK)
    assert [tier_of(each) for each in resident] == [Tier.DEVICE] * 2
    assert bench.placement.counts().dropped == 0
