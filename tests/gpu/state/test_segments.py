"""A step is cut into segments where a row leaves or joins, and into pieces where it does not fit. A context knows the
edits that it will be computed with.
"""

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Intervention, Pass, When
from app.domain.positions import Run
from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.state.paths import LoadCheckpoint, PassPlan, Record, expected_edits
from app.gpu.state.segments import Row, SplitSize, split_off
from app.gpu.state.sequence import TokenSequence, TurnState
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import greedy

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 12
WHOLE = PassPlan(0, 4)


@pytest.fixture
def driver(tiny_llama: TinyModel) -> BreakDriver:
    return BreakDriver(tiny_llama.engine())


def spans(driver: BreakDriver) -> list[list[tuple[int, int, int]]]:
    """Of every step so far: each segment's first layer, the layer after its last, and its rows."""
    found = [[(part.lo, part.hi, len(part.rows)) for part in step] for step in driver.segments()]
    driver.plans.clear()
    return found


@pytest.mark.parametrize("when", [None, When(position=1000), When(token_id=1), When(Pass.DECODE, every=97)], ids=str)
def test_without_a_match_every_step_is_one_segment(driver: BreakDriver, when: When | None) -> None:
    turns = []
    for seed in range(3):
        session = driver.open()
        if when is not None:
            driver.arm(session, 0, 2, when=when)
        turns.append(driver.begin(session, prompt(seed, 7), COUNT))
    driver.settle(*turns)
    assert not any(turn.paused for turn in turns)
    assert spans(driver) == [[(0, 4, 3)]] * COUNT


def test_others_run_as_one_segment_while_a_session_is_paused(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    session = driver.open_armed(1)
    paused = driver.turn(session, prompt(9, 6), COUNT)
    spans(driver)
    others = [driver.begin(driver.open(), prompt(seed, 7), COUNT) for seed in range(4)]
    driver.settle(*others)
    steps = spans(driver)
    assert len(steps) == COUNT
    assert all(step == [(0, 4, 4)] for step in steps)
    assert paused.paused
    driver.run(paused)
    assert paused.tokens == greedy(tiny_llama.oracle, prompt(9, 6), COUNT)


def test_a_row_leaves_at_its_boundary_and_joins_the_others_there(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    others = [driver.begin(driver.open(), prompt(seed, 7), COUNT) for seed in range(2)]
    session = driver.open_armed(1)
    turn = driver.turn(session, prompt(9, 6), 3)
    assert spans(driver)[-1] == [(0, 2, 3), (2, 4, 2)]
    driver.resume(turn)
    driver.advance()
    assert spans(driver) == [[(0, 2, 2), (2, 4, 3)]]
    driver.advance()
    assert spans(driver) == [[(0, 2, 3), (2, 4, 2)]]
    driver.run(turn)
    driver.settle(*others)
    for seed, other in enumerate(others):
        assert other.tokens == greedy(tiny_llama.oracle, prompt(seed, 7), COUNT)
    assert turn.tokens == greedy(tiny_llama.oracle, prompt(9, 6), 3)


def make_row(number: int, first: int, length: int, path: PassPlan = WHOLE) -> Row:
    sequence = TokenSequence(SessionId(f"s{number}"), b"", tokens=[0] * (first + length))
    turn = TurnState(Ticket(number), SamplingParams(seed=0), StopRule(1), first + length, 0)
    return Row(sequence, turn, first, length, path, samples=True, scores_prompt=False)


def all_pieces(rows: list[Row], limit: int) -> list[list[Row]]:
    waiting, pieces = deque(rows), []
    while waiting:
        pieces.append(split_off(waiting, limit))
    return pieces


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 40))
def test_pieces_hold_every_token_once_and_rows_of_one_token_first(lengths: list[int], limit: int) -> None:
    rows = [make_row(i, 3 * i, length) for i, length in enumerate(sorted(lengths, key=lambda length: length > 1))]
    assert all_pieces(rows, sum(lengths)) == [rows], "as many as fit run together"
    pieces = all_pieces(rows, limit)
    for piece in pieces:
        assert sum(row.length for row in piece) <= limit
        assert sorted(piece, key=lambda row: row.length > 1) == piece
    run = [(row.whole, position) for piece in pieces for row in piece for position in range(row.first, row.end)]
    assert run == [(row, position) for row in rows for position in range(row.first, row.end)]
    assert [row.whole for piece in pieces for row in piece if row.ends] == rows
    assert all(row.samples == row.ends for piece in pieces for row in piece)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.data())
def test_pieces_that_are_put_back_are_run_in_order_and_apart(lengths: list[int], data: st.DataObject) -> None:
    """As `Runner.launch` does it, with memory that is now enough for a piece and now is not."""
    rows = [make_row(i, 0, length) for i, length in enumerate(sorted(lengths, key=lambda length: length > 1))]
    waiting, size, run = deque(rows), SplitSize(), list[Row]()
    while waiting:
        piece = split_off(waiting, size.limit)
        assert sorted(piece, key=lambda row: row.length > 1) == piece
        assert len({row.whole for row in piece}) == len(piece)
        tokens = sum(row.length for row in piece)
        if tokens > 1 and data.draw(st.booleans()):
            size.shrink(tokens)
            waiting.extendleft(reversed(piece))
        else:
            size.note_fit()
            run += piece
    positions = [(row.whole, position) for row in run for position in range(row.first, row.end)]
    assert positions == [(row, position) for row in rows for position in range(row.first, row.end)]


def test_what_happens_to_a_row_happens_to_its_pieces_where_it_should() -> None:
    edit = Edit(EditOp.SCALE, factor=2.0)
    steps = (
        Intervention(10, 16, 1, edit),
        Record(1, "a", (Run(11, 13), Run(14, 15))),
        LoadCheckpoint(2),
        Record(3, "b", (Run(10, 11),)),
    )
    row = make_row(0, 10, 6, PassPlan(0, 3, steps, pauses=True, breakpoint="c", spent=("a",)))
    [left], [right] = all_pieces([row], 3)
    assert list(left.path.steps) == [
        Intervention(10, 13, 1, edit),
        Record(1, "a", (Run(11, 13),)),
        LoadCheckpoint(2),
        Record(3, "b", (Run(10, 11),)),
    ]
    assert list(right.path.steps) == [
        Intervention(13, 16, 1, edit),
        Record(1, "a", (Run(14, 15),)),
        LoadCheckpoint(2),
    ]
    assert all(piece.path.pauses and piece.path.hi == 3 for piece in (left, right))


HALVE, DOUBLE = Edit(EditOp.SCALE, 0.5), Edit(EditOp.SCALE, 2.0)


def steered(name: str, edit: Edit) -> Breakpoint:
    return Breakpoint(name, (0,), Action.EDIT, edits=(edit,))


def waiting() -> TokenSequence:
    """A turn of 20 tokens, of which 8 have been computed with an edit before."""
    sequence = TokenSequence(SessionId("ses_1"), b"", tokens=[1] * 20, reached=8)
    sequence.breakpoints["a"] = steered("a", HALVE)
    sequence.interventions.add(Intervention(0, 8, 1, HALVE))
    sequence.turn = TurnState(Ticket(1), SamplingParams(seed=0), StopRule(1), 20, 0)
    return sequence


CHANGES: dict[str, Callable[[TokenSequence], object]] = {
    "another breakpoint": lambda sequence: sequence.breakpoints.update(b=steered("b", DOUBLE)),
    "no breakpoint": lambda sequence: sequence.breakpoints.clear(),
    "one more edit": lambda sequence: sequence.interventions.add(Intervention(3, 4, 1, DOUBLE)),
    "fewer edits": lambda sequence: sequence.interventions.truncate(4),
    "one more token": lambda sequence: sequence.tokens.append(1),
    "an edit that pauses": lambda sequence: sequence.breakpoints.update(b=Breakpoint("b", (0,), Action.PAUSE)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_them_is_followed(change: Callable[[TokenSequence], object]) -> None:
    sequence, other = waiting(), waiting()
    before = expected_edits(sequence)
    change(sequence)
    change(other)
    (log, limit), (fresh, fresh_limit) = expected_edits(sequence), expected_edits(other)
    assert (log.snapshot(), limit) == (fresh.snapshot(), fresh_limit)
    assert (log.snapshot(), limit) != (before[0].snapshot(), before[1])
