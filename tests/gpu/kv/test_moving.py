"""What moves between tiers, and moves that are overtaken. What a look for them costs: in calls, not in seconds."""

import random
from collections.abc import Callable
from functools import partial

import pytest

from app.domain.values import Phase, Tier
from app.gpu.kv.phases import BLOCKS_A_LOOK, TRIED, ShutdownFlush
from app.gpu.state.moves import Moved, MoveKind
from app.gpu.state.sequence import TokenSequence
from tests.gpu.kv.tiering import BLOCK_BYTES, BLOCK_SIZE, LENGTH, Bench, growth, paused_on_host, tier_of


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


def crowded(number: int) -> tuple[Bench, list[TokenSequence]]:
    """A device that a session which runs has to itself: others are away, half of which are due."""
    bench = Bench(device=16, host=8 * number)
    sessions = []
    for each in range(2 * number):
        resume_in_s = 1.0 if each < number else 1000.0
        sessions.append(bench.session(2 * BLOCK_SIZE, Phase.IO_WAIT, resume_in_s, first_token=each))
    bench.begin_turn(bench.session(16 * BLOCK_SIZE, first_token=-1))
    bench.now += 10
    bench.phases.tick()
    assert {tier_of(each) for each in sessions} == {Tier.HOST}
    return bench, sessions


def without_host(number: int) -> tuple[Bench, list[TokenSequence]]:
    """Sessions that would leave the device, and find no room on the host."""
    bench = Bench(device=2 * number, host=0, disk=0)
    sessions = [bench.session(2 * BLOCK_SIZE, first_token=each) for each in range(number)]
    for sequence in sessions:
        bench.phases.signal(sequence, Phase.IO_WAIT, 1000.0)
    bench.phases.tick()
    bench.placement.take_placed()
    return bench, sessions


@pytest.mark.parametrize("make", [crowded, without_host])
@pytest.mark.parametrize("what", ["a look without news", "a word of one session"])
def test_a_look_costs_the_same_beside_ten_times_as_many_sessions(
    make: Callable[[int], tuple[Bench, list[TokenSequence]]], what: str
) -> None:
    def prepare(number: int) -> Callable[[], object]:
        bench, sessions = make(number)
        if what == "a word of one session":
            return partial(bench.phases.signal, sessions[-1], Phase.IO_WAIT, 900.0)
        bench.placement.changed = True
        return bench.phases.tick

    assert growth(prepare) < 1.2


def test_room_for_a_small_session_is_used_although_larger_ones_come_first() -> None:
    bench = Bench(device=16, host=64)
    large = [bench.session(5 * BLOCK_SIZE, Phase.IO_WAIT, 1.0, first_token=number) for number in range(TRIED - 1)]
    small = bench.session(2 * BLOCK_SIZE, Phase.IO_WAIT, 2.0, first_token=-1)
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


def drain(number: int) -> Callable[[], object]:
    """All of so many sessions leave."""
    bench = Bench(device=2 * number, host=2 * number)
    for each in range(number):
        bench.phases.signal(bench.session(2 * BLOCK_SIZE, first_token=each), Phase.IO_WAIT, 1000.0)
    return bench.finish


def make_all_room(number: int, *, on_host: bool = False) -> Callable[[], object]:
    """One prompt asks for the whole device, which so many sessions fill. The host is empty, or full too."""
    bench = Bench(device=2 * number, host=2 * number, disk=4 * number)
    for each in range(number) if on_host else ():
        bench.placed(2, Tier.HOST, first_token=-1 - each)
    for each in range(number):
        bench.session(2 * BLOCK_SIZE, first_token=each)
    turn = bench.session(0)
    bench.begin_turn(turn)
    return partial(bench.placement.make_room, 2 * number, turn)


@pytest.mark.parametrize(
    ("prepare", "few", "most"),
    [(drain, 40, 12), (make_all_room, 40, 12), (partial(make_all_room, on_host=True), 20, 15)],
)
def test_ten_times_as_many_sessions_that_leave_cost_no_more_each(
    prepare: Callable[[int], Callable[[], object]], few: int, most: int
) -> None:
    assert 8 < growth(prepare, few) < most
