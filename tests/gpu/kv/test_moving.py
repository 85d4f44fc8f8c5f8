"""What moves between tiers, and moves that are overtaken. At its end a server keeps the first sessions on disk."""

import random
from collections.abc import Callable

import pytest

from app.domain.values import Phase, Tier
from app.gpu.kv.shutdown import ShutdownFlush
from app.gpu.state.moves import Moved, MoveKind
from app.gpu.state.sequence import TokenSequence
from tests.gpu.kv.tiering import BLOCK_BYTES, BLOCK_SIZE, LENGTH, Bench, paused_on_host, tier_of


@pytest.mark.parametrize(("computed", "disk"), [(0, 4), (BLOCK_SIZE, 5)])
def test_half_a_pass_takes_no_room_on_disk_from_anybody(computed: int, disk: int) -> None:
    bench = Bench(disk=disk)
    older = bench.placed(4, Tier.DISK)
    paused = paused_on_host(bench, computed)
    assert len(paused.host_blocks) == LENGTH // BLOCK_SIZE
    assert bench.placement.save(paused)
    moves = bench.finish()
    assert [move.kind for move in moves] == [MoveKind.TO_DISK] * bool(computed)
    assert tier_of(older) is Tier.DISK
    assert bench.placement.counts().dropped == 0
    assert bench.host.owned == 0
    assert bench.tiers.file_blocks == 4 + computed // BLOCK_SIZE
    assert tier_of(paused) is (Tier.DISK if computed else None)


def test_files_give_way_to_what_must_have_the_disk_copies_and_the_oldest_first() -> None:
    bench = Bench(disk=32)
    older, newer, promised = (bench.placed(4, Tier.DISK) for _ in range(3))
    copied = bench.placed(2, Tier.DISK)
    promised.guaranteed = True
    bench.load(copied)
    assert bench.tiers.file_blocks == 14
    for blocks, left in ((1, 12), (3, 8), (1, 4), (100, 4), (1, 4)):
        bench.placement.give_way(blocks)
        assert {move.kind for move in bench.finish()} <= {MoveKind.DELETE}
        assert bench.tiers.file_blocks == left
    assert [tier_of(each) for each in (copied, older, newer, promised)] == [Tier.HOST, None, None, Tier.DISK]
    assert bench.placement.counts().dropped == 2


def test_kv_of_a_turn_that_waits_goes_to_disk_for_a_turn_only() -> None:
    bench = Bench(host=8)
    waiting, returning, turn = bench.session(6 * BLOCK_SIZE), bench.placed(4, Tier.DISK), bench.placed(4, Tier.DISK)
    bench.park(waiting)
    bench.begin_turn(waiting)
    assert not bench.placement.make_host_room(4, returning)
    assert waiting.moving is None
    bench.begin_turn(turn)
    bench.placement.make_host_room(4, turn)
    assert waiting.moving is Tier.TO_DISK


def test_a_save_that_is_turned_round_is_no_room_to_wait_for() -> None:
    bench = Bench(device=16, host=8, disk=64)
    first, second = bench.session(4 * BLOCK_SIZE, first_token=1), bench.session(4 * BLOCK_SIZE, first_token=2)
    for each in (first, second):
        bench.park(each)
    resident = [bench.session(4 * BLOCK_SIZE, first_token=10 + number) for number in range(2)]
    turn = bench.session(0)
    bench.begin_turn(turn)
    needed = bench.device.available + 4
    bench.placement.make_room(needed, turn)
    assert (first.moving, second.moving) == (Tier.TO_DISK, None)
    bench.begin_turn(first)
    bench.placement.forget_order()
    bench.placement.make_room(needed, turn)
    assert (first.moving, second.moving) == (None, Tier.TO_DISK)
    assert [tier_of(each) for each in resident] == [Tier.DEVICE] * 2
    assert bench.placement.counts().dropped == 0


FIRST_GUESS_S = BLOCK_BYTES / 5e8
"""What a block is expected to take to disk."""


def run(
    bench: Bench,
    sequences: list[TokenSequence],
    *,
    within_s: float = 1e6,
    choose: random.Random | None = None,
    meanwhile: Callable[[int], None] = lambda moves: None,
    fails: Callable[[MoveKind], bool] = lambda kind: False,
) -> ShutdownFlush:
    """To the end. Moves end in their order, or as `choose` has it; each takes as long as is expected. `meanwhile` is
    called with the number of moves that have ended.
    """
    bench.phases.rest()
    keeping = ShutdownFlush(bench.placement, sequences, bench.now + within_s)
    is_over, ordered, ended = keeping.go_on(), bench.orders(), 0
    while not is_over:
        assert ordered or keeping.is_due, "nothing moves, and it is not over"
        if ordered:
            move = ordered.pop(0 if choose is None else choose.randrange(len(ordered)))
            ended += 1
            bench.now += len(move.source) * FIRST_GUESS_S * (move.kind is MoveKind.TO_DISK)
            bench.complete(Moved(move.number, 0.0, "broken" if fails(move.kind) else None))
        meanwhile(ended)
        is_over = keeping.go_on()
        ordered += bench.orders()
    bench.finish()
    return keeping


@pytest.mark.parametrize("seed", range(20))
def test_the_first_ones_have_the_room_on_disk(seed: int) -> None:
    choose = random.Random(seed)
    bench = Bench(device=64, host=choose.choice([4, 8, 64]), disk=12)
    sequences: list[TokenSequence] = []
    for number in range(8):
        blocks = choose.randint(1, 6)
        tiers = [Tier.DEVICE, *([Tier.HOST] if bench.host.available >= blocks else [])]
        if bench.host.available >= blocks and bench.tiers.file_blocks + blocks <= 12:
            tiers.append(Tier.DISK)
        sequences.append(bench.placed(blocks, choose.choice(tiers), first_token=number))
    choose.shuffle(sequences)
    expected, room = [], 12
    for sequence in sequences:
        blocks = len(sequence.tokens) // BLOCK_SIZE
        if blocks <= room and (blocks <= bench.host.num_blocks or sequence.tier is Tier.DISK):
            expected.append(sequence)
            room -= blocks
    keeping = run(bench, sequences, choose=choose)
    assert [each for each in keeping.kept if each in expected] == expected
    assert bench.tiers.file_blocks <= 12


def test_what_is_on_disk_already_is_not_written_again() -> None:
    bench = Bench()
    sequence = bench.placed(3, Tier.DISK)
    bench.load(sequence)
    bench.restore(sequence)
    bench.placement.refile(sequence)
    keeping = run(bench, [sequence])
    assert tier_of(sequence) is Tier.DEVICE
    assert keeping.kept == [sequence]


def test_nothing_is_begun_that_would_not_be_over_in_time() -> None:
    bench = Bench(device=64, host=64, disk=64)
    sequences = [bench.placed(4, Tier.HOST) for _ in range(6)]
    until = bench.now + 3.5 * 4 * FIRST_GUESS_S
    assert run(bench, sequences, within_s=until - bench.now).kept == sequences[:3]
    assert bench.now <= until


def test_a_session_that_closes_meanwhile_is_neither_kept_nor_lost() -> None:
    bench = Bench()
    closing, other = bench.placed(3, Tier.DEVICE), bench.placed(3, Tier.DEVICE)
    keeping = run(bench, [closing, other], meanwhile=lambda ended: bench.close(closing) if ended == 1 else None)
    assert (keeping.kept, keeping.lost) == ([other], [])
    assert bench.tiers.file_blocks == 3


@pytest.mark.parametrize("kind", [MoveKind.OUT, MoveKind.TO_DISK])
def test_it_ends_when_every_move_fails(kind: MoveKind) -> None:
    bench = Bench()
    sequences = [bench.placed(2, Tier.DEVICE) for _ in range(3)]
    keeping = run(bench, sequences, within_s=1.0, fails=lambda each: each is kind)
    assert keeping.lost == sequences


def test_no_signal_brings_kv_back_meanwhile() -> None:
    bench = Bench()
    sequence = bench.placed(3, Tier.DEVICE)
    keeping = run(bench, [sequence], meanwhile=lambda ended: bench.phases.signal(sequence, Phase.READY, None))
    assert keeping.kept == [sequence]
    assert tier_of(sequence) is Tier.DISK


def test_a_file_that_a_client_has_sent_is_written_anew() -> None:
    bench = Bench(device=8, host=4, disk=8)
    sent, other = bench.placed(4, Tier.DISK), bench.placed(4, Tier.DEVICE)
    sent.sent = True
    keeping = run(bench, [sent, other])
    assert keeping.kept == [sent, other]
    assert bench.placement.meter.totals()["to_disk"].moves == 3  # the first put the file there
    assert not sent.sent


def test_turns_that_still_run_push_no_kept_file_out() -> None:
    bench = Bench(disk=8)
    first, second = bench.placed(4, Tier.HOST), bench.placed(4, Tier.HOST)
    run(bench, [first, second])
    late = bench.placed(4, Tier.HOST)
    assert not bench.placement.save(late)
    assert [tier_of(each) for each in (first, second, late)] == [Tier.DISK, Tier.DISK, Tier.HOST]


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_a_late_move_of_a_closed_session_leaves_one_that_has_its_id_now_where_it_is(tier: Tier) -> None:
    """A session that has left for another server, and come back."""
    bench = Bench()
    gone = bench.placed(3, Tier.DISK)
    bench.close(gone)
    [deleting] = bench.orders()
    back = TokenSequence(gone.session, b"back", tokens=[0] * 3 * BLOCK_SIZE)
    bench.cache.reserve(back, len(back.tokens))
    bench.cache.commit(back, len(back.tokens))
    bench.placement.end_turn(back)
    bench.bring_to(back, tier)
    bench.placement.refile(back)
    bench.placement.take_placed()
    bench.complete(Moved(deleting.number, 0.001))
    lists = bench.placement.away if tier is Tier.HOST else bench.placement.resident
    assert lists[back.session] is back
    assert bench.placement.take_placed() == []
