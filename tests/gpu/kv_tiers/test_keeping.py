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
TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.TO_HOST, Tier.TO_DEVICE, Tier.TO_DISK)
FIRST_GUESS_S = BLOCK_BYTES / 5e8
"""What a block is expected to take to disk."""


def placed(bench: Bench, blocks: int, tier: Tier) -> TokenSequence:
    """A session whose `blocks` blocks of KV are in `tier`, or on their way there."""
    sequence = bench.session(blocks * BLOCK_SIZE, first_token=random.randint(0, 1 << 20))
    bench.bring_to(sequence, tier)
    bench.placement.refile(sequence)
    return sequence


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


@pytest.mark.parametrize("seed", range(60))
def test_all_that_fits_is_kept_wherever_it_is_and_moves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(seed)
    monkeypatch.setattr("app.gpu.kv_tiers.keeping.UNDER_WAY_BYTES", choose.choice([1, 4, 100]) * BLOCK_BYTES)
    bench = Bench(device=40, host=choose.choice([6, 9, 64]), disk=200)
    sequences = []
    for _ in range(8):
        blocks, tier = choose.randint(1, 5), choose.choice(TIERS)
        if bench.host.available < 2 * blocks and tier is not Tier.DEVICE:
            tier = Tier.DEVICE
        sequences.append(placed(bench, blocks, tier))
    keeping = run(bench, sequences, choose=choose)
    assert keeping.kept == sequences
    assert keeping.lost == []
    assert bench.placement.counts().dropped == 0
    assert bench.placement.lower.disk_used == sum(len(each.tokens) // BLOCK_SIZE for each in sequences)


@pytest.mark.parametrize("seed", range(60))
def test_the_first_ones_have_the_room_on_disk(seed: int) -> None:
    choose = random.Random(seed)
    bench = Bench(device=64, host=choose.choice([8, 64]), disk=12)
    sequences: list[TokenSequence] = []
    for _ in range(8):
        blocks = choose.randint(1, 6)
        on_disk = bench.placement.lower.disk_used + blocks <= 12 and bench.host.available >= blocks
        sequences.append(placed(bench, blocks, choose.choice([Tier.DEVICE, Tier.DISK] if on_disk else [Tier.DEVICE])))
    choose.shuffle(sequences)
    expected, room = [], 12
    for sequence in sequences:
        if (blocks := len(sequence.tokens) // BLOCK_SIZE) <= room:
            expected.append(sequence)
            room -= blocks
    keeping = run(bench, sequences, choose=choose)
    assert [each for each in keeping.kept if each in expected] == expected
    assert bench.placement.lower.disk_used <= 12


def test_a_session_on_the_host_whose_file_is_written_gives_way_there() -> None:
    bench = Bench(device=64, host=6, disk=200)
    written = placed(bench, 3, Tier.DISK)
    bench.tiers.files.load(written)
    bench.finish()
    bench.placement.refile(written)
    assert tier_of(written) is Tier.HOST
    large = placed(bench, 5, Tier.DEVICE)
    assert run(bench, [written, large]).kept == [written, large]


def test_what_is_on_disk_already_is_not_written_again() -> None:
    bench = Bench()
    sequence = placed(bench, 3, Tier.DISK)
    bench.tiers.files.load(sequence)
    bench.finish()
    bench.tiers.restore(sequence)
    bench.finish()
    bench.placement.refile(sequence)
    keeping = run(bench, [sequence])
    assert tier_of(sequence) is Tier.DEVICE
    assert keeping.kept == [sequence]


def test_one_that_is_larger_than_the_host_holds_up_no_other() -> None:
    bench = Bench(device=32, host=4)
    large, small = placed(bench, 8, Tier.DEVICE), placed(bench, 4, Tier.DEVICE)
    keeping = run(bench, [large, small])
    assert keeping.kept == [small]
    assert keeping.lost == [large]


def test_one_that_is_larger_than_what_moves_at_once_has_the_room_of_those_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.gpu.kv_tiers.keeping.UNDER_WAY_BYTES", BLOCK_BYTES)
    bench = Bench(device=16, host=8)
    large, small = placed(bench, 8, Tier.DEVICE), placed(bench, 4, Tier.HOST)
    assert run(bench, [large, small]).kept == [large, small]


def test_host_room_goes_from_kv_that_no_file_will_keep_to_kv_that_one_will() -> None:
    bench = Bench(device=16, host=4, disk=4)
    lesser = placed(bench, 4, Tier.HOST)
    first = placed(bench, 4, Tier.DEVICE)
    keeping = run(bench, [first, lesser])
    assert keeping.kept == [first]
    assert tier_of(lesser) is None


def test_nothing_is_begun_that_would_not_be_over_in_time() -> None:
    bench = Bench(device=64, host=64, disk=64)
    sequences = [placed(bench, 4, Tier.HOST) for _ in range(6)]
    until = bench.now + 3.5 * 4 * FIRST_GUESS_S
    assert run(bench, sequences, within_s=until - bench.now).kept == sequences[:3]
    assert bench.now <= until


def test_a_session_with_a_turn_is_kept_once_its_turn_is_over() -> None:
    bench = Bench()
    busy, idle = placed(bench, 3, Tier.DEVICE), placed(bench, 3, Tier.DEVICE)
    bench.begin_turn(busy)

    def end_turn(ended: int) -> None:
        if ended == 2:  # when the other is on disk
            busy.turn = None
            bench.placement.end_turn(busy)

    assert run(bench, [busy, idle], meanwhile=end_turn).kept == [busy, idle]


def test_a_session_that_closes_meanwhile_is_neither_kept_nor_lost() -> None:
    bench = Bench()
    closing, other = placed(bench, 3, Tier.DEVICE), placed(bench, 3, Tier.DEVICE)
    keeping = run(bench, [closing, other], meanwhile=lambda ended: bench.close(closing) if ended == 1 else None)
    assert (keeping.kept, keeping.lost) == ([other], [])
    assert bench.placement.lower.disk_used == 3


@pytest.mark.parametrize("kind", [MoveKind.OUT, MoveKind.TO_DISK])
def test_it_ends_when_every_move_fails(kind: MoveKind) -> None:
    bench = Bench()
    sequences = [placed(bench, 2, Tier.DEVICE) for _ in range(3)]
    keeping = run(bench, sequences, within_s=1.0, fails=lambda each: each is kind)
    assert keeping.lost == sequences


def test_no_signal_brings_kv_back_meanwhile() -> None:
    bench = Bench()
    sequence = placed(bench, 3, Tier.DEVICE)
    keeping = run(bench, [sequence], meanwhile=lambda ended: bench.phases.signal(sequence, Phase.READY, None))
    assert keeping.kept == [sequence]
    assert tier_of(sequence) is Tier.DISK


def test_a_file_that_a_client_has_sent_is_written_anew() -> None:
    bench = Bench(device=8, host=4, disk=8)
    sent, other = placed(bench, 4, Tier.DISK), placed(bench, 4, Tier.DEVICE)
    sent.sent = True
    keeping = run(bench, [sent, other])
    assert keeping.kept == [sent, other]
    assert bench.placement.meter.totals()["to_disk"].moves == 3  # the first put the file there
    assert not sent.sent


def test_turns_that_still_run_push_no_kept_file_out() -> None:
    bench = Bench(disk=8)
    first, second = placed(bench, 4, Tier.HOST), placed(bench, 4, Tier.HOST)
    run(bench, [first, second])
    late = placed(bench, 4, Tier.HOST)
    assert not bench.placement.lower.save(late)
    assert [tier_of(each) for each in (first, second, late)] == [Tier.DISK, Tier.DISK, Tier.HOST]
