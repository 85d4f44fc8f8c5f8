"""What is on disk when the server ends: as much as there is room and time for, the first sessions first."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from app.domain.values import Phase, Tier
from app.gpu.kv.moves import Moved, MoveKind
from app.gpu.kv_tiers.keeping import Keeping
from app.gpu.state.sequence import TokenSequence
from tests.gpu.kv_tiers.tiering import BLOCK_BYTES, BLOCK_SIZE, Bench, tier_of

LONG = 1e6
FIRST_GUESS_S = BLOCK_BYTES / 5e8
"""What a block is expected to take to disk."""


def run(
    bench: Bench,
    sequences: list[TokenSequence],
    *,
    within_s: float = LONG,
    choose: random.Random | None = None,
    meanwhile: Callable[[int], None] = lambda moves: None,
    fails: Callable[[MoveKind], bool] = lambda kind: False,
) -> Keeping:
    """To the end. Moves end in their order, or as `choose` has it; each takes as long as is expected. `meanwhile` is
    called with the number of moves that have ended.
    """
    bench.phases.rest()
    keeping = Keeping(bench.placement, sequences, bench.now + within_s)
    keeping.tick()
    ordered, ended = bench.orders(), 0
    while not keeping.is_over:
        assert ordered or keeping.is_due, "nothing moves, and it is not over"
        if ordered:
            move = ordered.pop(0 if choose is None else choose.randrange(len(ordered)))
            ended += 1
            bench.now += len(move.source) * FIRST_GUESS_S * (move.kind is MoveKind.TO_DISK)
            bench.complete(Moved(move.number, 0.0, "broken" if fails(move.kind) else None))
        meanwhile(ended)
        keeping.tick()
        ordered += bench.orders()
    bench.finish()
    return keeping


@pytest.mark.parametrize("seed", range(20))
def test_the_first_ones_have_the_room_on_disk(seed: int) -> None:
    choose = random.Random(seed)
    bench = Bench(device=64, host=choose.choice([8, 64]), disk=12)
    sequences: list[TokenSequence] = []
    for number in range(8):
        blocks = choose.randint(1, 6)
        on_disk = bench.placement.lower.disk_used + blocks <= 12 and bench.host.available >= blocks
        tier = choose.choice([Tier.DEVICE, Tier.DISK] if on_disk else [Tier.DEVICE])
        sequences.append(bench.placed(blocks, tier, first_token=number))
    choose.shuffle(sequences)
    expected, room = [], 12
    for sequence in sequences:
        if (blocks := len(sequence.tokens) // BLOCK_SIZE) <= room:
            expected.append(sequence)
            room -= blocks
    keeping = run(bench, sequences, choose=choose)
    assert [each for each in keeping.kept if each in expected] == expected
    assert bench.placement.lower.disk_used <= 12


def test_what_is_on_disk_already_is_not_written_again() -> None:
    bench = Bench()
    sequence = bench.placed(3, Tier.DISK)
    bench.load(sequence)
    bench.restore(sequence)
    bench.placement.refile(sequence)
    keeping = run(bench, [sequence])
    assert tier_of(sequence) is Tier.DEVICE
    assert keeping.kept == [sequence]


def test_one_that_is_larger_than_the_host_holds_up_no_other() -> None:
    bench = Bench(device=32, host=4)
    large, small = bench.placed(8, Tier.DEVICE), bench.placed(4, Tier.DEVICE)
    keeping = run(bench, [large, small])
    assert keeping.kept == [small]
    assert keeping.lost == [large]


def test_host_room_goes_from_kv_that_no_file_will_keep_to_kv_that_one_will() -> None:
    bench = Bench(device=16, host=4, disk=4)
    lesser = bench.placed(4, Tier.HOST)
    first = bench.placed(4, Tier.DEVICE)
    keeping = run(bench, [first, lesser])
    assert keeping.kept == [first]
    assert tier_of(lesser) is None


def test_nothing_is_begun_that_would_not_be_over_in_time() -> None:
    bench = Bench(device=64, host=64, disk=64)
    sequences = [bench.placed(4, Tier.HOST) for _ in range(6)]
    until = bench.now + 3.5 * 4 * FIRST_GUESS_S
    assert run(bench, sequences, within_s=until - bench.now).kept == sequences[:3]
    assert bench.now <= until


def test_a_session_with_a_turn_is_kept_once_its_turn_is_over() -> None:
    bench = Bench()
    busy, idle = bench.placed(3, Tier.DEVICE), bench.placed(3, Tier.DEVICE)
    bench.begin_turn(busy)

    def end_turn(ended: int) -> None:
        if ended == 2:  # when the other is on disk
            busy.turn = None
            bench.placement.end_turn(busy)

    assert run(bench, [busy, idle], meanwhile=end_turn).kept == [busy, idle]


def test_a_session_that_closes_meanwhile_is_neither_kept_nor_lost() -> None:
    bench = Bench()
    closing, other = bench.placed(3, Tier.DEVICE), bench.placed(3, Tier.DEVICE)
    keeping = run(bench, [closing, other], meanwhile=lambda ended: bench.close(closing) if ended == 1 else None)
    assert (keeping.kept, keeping.lost) == ([other], [])
    assert bench.placement.lower.disk_used == 3


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
    assert not bench.placement.lower.save(late)
    assert [tier_of(each) for each in (first, second, late)] == [Tier.DISK, Tier.DISK, Tier.HOST]
