"""What moves between tiers, and moves that are overtaken. At its end a server keeps the first sessions on disk."""

import random
from collections.abc import Callable

import pytest

from app.domain.values import Tier
from app.gpu.kv.phases import ShutdownFlush
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
    assert bench.placement.counts.dropped == 0
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
    assert bench.placement.counts.dropped == 2


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
        assert ordered, "nothing moves, and it is not over"
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


def test_a_file_that_a_client_has_sent_is_written_anew() -> None:
    bench = Bench(device=8, host=4, disk=8)
    sent, other = bench.placed(4, Tier.DISK), bench.placed(4, Tier.DEVICE)
    sent.sent = True
    keeping = run(bench, [sent, other])
    assert keeping.kept == [sent, other]
    assert bench.placement.meter.totals()["to_disk"].moves == 3  # the first put the file there
    assert not sent.sent
