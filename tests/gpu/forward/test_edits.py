"""Every edit gives exactly the tokens that the same change made by a forward hook in Transformers gives."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.domain.breakpoints import ALL, LAST, Action, Edit, EditOp, Intervention, Pass, Positions, When
from app.domain.errors import FieldOutOfRange
from app.domain.positions import positions_of, runs_of
from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.device.streams import CpuStreams, put_each
from app.gpu.forward.boundary import BoundaryActions, HostTensor, apply_edit, as_tensor
from app.gpu.forward.inputs import LEAST_ROWS, Batches
from app.gpu.state.paths import PassPlan, Record
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence, TurnState
from app.messages import Disarm
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import Where, change_of, data_of, edited, everywhere, greedy

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(8, 13)
COUNT = 8
LAYER = 1
FACTORS = {EditOp.SCALE: 0.4, EditOp.ADD: 2.5, EditOp.CLAMP: -6.0}
WITH_VECTOR = (EditOp.ADD, EditOp.REPLACE, EditOp.PROJECT_OUT, EditOp.CLAMP)
PLACES: dict[str, tuple[Positions, Where]] = {
    "last": (LAST, lambda position, _: position >= len(START) - 1),
    "all": (ALL, everywhere),
    "3-7": (Positions(3, 7), lambda position, _: 3 <= position < 7),
    "from-9": (Positions(9), lambda position, _: position >= 9),
}
PAIRS = [
    (op, place, max_norm)
    for number, op in enumerate(EditOp)
    for turn, place in enumerate(PLACES)
    for max_norm in [(None, 1.5, 1000.0)[(number + turn) % 3]]
]
"""Each operation at each place, and with each limit."""


def make_edit(op: EditOp, positions: Positions = ALL, max_norm: float | None = None) -> Edit:
    given = data_of(3 * vector(11, 48)) if op in WITH_VECTOR else None
    return Edit(op, FACTORS.get(op, 1.0), given, positions, max_norm)


@pytest.fixture(scope="module")
def plain(tiny_llama: TinyModel) -> list[int]:
    return greedy(tiny_llama.oracle, START, COUNT)


@pytest.fixture
def driver(tiny_llama: TinyModel) -> BreakDriver:
    return BreakDriver(tiny_llama.engine())


@pytest.mark.parametrize(("op", "place", "max_norm"), PAIRS)
def test_an_edit_breakpoint_is_a_forward_hook(
    driver: BreakDriver, tiny_llama: TinyModel, op: EditOp, place: str, max_norm: float | None
) -> None:
    positions, where = PLACES[place]
    edit = make_edit(op, positions, max_norm)
    session = driver.open_armed(LAYER, action=Action.EDIT, edits=(edit,))
    turn = driver.turn(session, START, COUNT)
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, [change_of(LAYER, edit, where)])


@pytest.mark.parametrize(("op", "place", "max_norm"), [pair for pair in PAIRS if pair[1] != "from-9"])
def test_an_edit_of_a_paused_prompt_is_a_forward_hook_in_that_pass(
    driver: BreakDriver, tiny_llama: TinyModel, op: EditOp, place: str, max_norm: float | None
) -> None:
    positions, where = PLACES[place]
    edit = make_edit(op, positions, max_norm)
    session = driver.open_armed(LAYER, when=When(Pass.PREFILL))
    turn = driver.turn(session, START, COUNT)
    before = driver.read(turn)
    driver.edit(turn, edit)
    for position, (old, new) in enumerate(zip(before, driver.read(turn), strict=True)):
        wanted = old
        if where(position, 0):
            wanted = edited(op, old, edit.factor, 3 * vector(11, 48), max_norm)
        torch.testing.assert_close(new, wanted, rtol=1e-5, atol=1e-5)
    driver.run(turn)
    change = change_of(LAYER, edit, lambda position, token: where(position, token) and position < len(START))
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, [change])


def test_every_operation_can_change_the_answer(tiny_llama: TinyModel, plain: list[int]) -> None:
    """Without this, the tests above could pass with edits that do nothing."""
    for op in EditOp:
        assert greedy(tiny_llama.oracle, START, COUNT, [change_of(LAYER, make_edit(op))]) != plain


def test_edits_are_made_one_after_the_other(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    edits = (make_edit(EditOp.ADD), make_edit(EditOp.SCALE), make_edit(EditOp.CLAMP, max_norm=4.0))
    changes = [change_of(layer, edit) for layer in (0, 2) for edit in edits]
    wanted = greedy(tiny_llama.oracle, START, COUNT, changes)
    session = driver.open_armed(0, 2, action=Action.EDIT, edits=edits)
    turn = driver.turn(session, START, COUNT)
    assert turn.tokens == wanted
    backwards = [change_of(layer, edit) for layer in (0, 2) for edit in reversed(edits)]
    assert greedy(tiny_llama.oracle, START, COUNT, backwards) != wanted


def test_conditions_choose_the_positions_that_are_edited(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    edit, session, token = make_edit(EditOp.ADD), driver.open(), START[4]
    driver.arm(session, 0, action=Action.EDIT, edits=(edit,), when=When(every=3))
    driver.arm(session, 2, action=Action.EDIT, edits=(make_edit(EditOp.SCALE, Positions(2, 16)),))
    driver.arm(session, 1, action=Action.EDIT, edits=(edit,), when=When(Pass.PREFILL, token_id=token))
    turn = driver.turn(session, START, COUNT)
    changes = [
        change_of(0, edit, lambda position, _: position % 3 == 0),
        change_of(2, make_edit(EditOp.SCALE), lambda position, _: 2 <= position < 16),
        change_of(1, edit, lambda position, found: position < len(START) and found == token),
    ]
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, changes)


HUGE = data_of(torch.full((48,), 1e20))


@pytest.mark.parametrize(
    ("edit", "direction"),
    [
        (Edit(EditOp.ADD, 1.0, HUGE), 1.0),
        (Edit(EditOp.ADD, -2.0, HUGE), -1.0),
        (Edit(EditOp.REPLACE, vector=HUGE), 1.0),
        (Edit(EditOp.CLAMP, 1e20, data_of(torch.ones(48))), 1.0),
        (Edit(EditOp.SCALE, 1e20), None),
    ],
    ids=["add", "subtract", "replace", "clamp", "scale"],
)
def test_a_huge_change_is_shortened_to_its_limit(driver: BreakDriver, edit: Edit, direction: float | None) -> None:
    """The squares of such vectors are no float32 numbers."""
    session, max_norm = driver.open(), 0.5
    driver.arm(session, LAYER, when=When(Pass.PREFILL))
    turn = driver.turn(session, START, COUNT)
    before = driver.read(turn).double()
    driver.edit(turn, replace(edit, max_norm=max_norm))
    change = driver.read(turn).double() - before
    wanted = before if direction is None else torch.full_like(before, direction)
    wanted = max_norm * wanted / torch.linalg.vector_norm(wanted, dim=-1, keepdim=True)
    torch.testing.assert_close(change, wanted, rtol=1e-3, atol=1e-4)


def test_steering_that_leads_out_of_the_numbers_fails_its_turn_alone(driver: BreakDriver, plain: list[int]) -> None:
    session = driver.open_armed(LAYER, action=Action.EDIT, edits=(Edit(EditOp.SCALE, 3e38), Edit(EditOp.SCALE, 3e38)))
    other = driver.begin(driver.open(), START, COUNT)
    driver.advance()
    turn = driver.begin(session, START, COUNT)
    with pytest.raises(FieldOutOfRange) as caught:
        driver.settle(turn)
    assert caught.value.param == "edits"
    driver.settle(other)
    assert other.tokens == plain
    driver.do(Disarm(driver.ticket(), session))
    again = driver.turn(session, START, COUNT)
    assert again.tokens == plain


# What a step does to many rows or positions at once: to each what it does to one.

FIRST, LENGTH = 7, 40
CPU = torch.device("cpu")
EVERY = st.integers(1, LENGTH).map(lambda step: {each for each in range(FIRST, FIRST + LENGTH) if each % step == 0})
ANY = st.sets(st.integers(FIRST, FIRST + LENGTH - 1))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def row_with(step: Intervention | Record) -> Row:
    tokens = list(range(100, 100 + FIRST + LENGTH))
    sequence = TokenSequence(SessionId("ses"), b"", tokens=tokens)
    turn = TurnState(Ticket(1), SamplingParams(seed=0), StopRule(1), len(tokens), 0)
    path = PassPlan(0, 4, (step,))
    return Row(sequence, turn, FIRST, LENGTH, path, samples=False, scores_prompt=False)


@given(
    op=st.sampled_from(EditOp),
    factor=st.sampled_from([-2.0, 0.3, 1.0]),
    max_norm=st.sampled_from([None, 0.5]),
    chosen=(EVERY | ANY).filter(bool),
    hidden_size=st.sampled_from([3, 48, 960]),
    dtype=DTYPES,
)
def test_an_indexed_edit_has_the_bits_of_one_position_after_the_other(
    op: EditOp, factor: float, max_norm: float | None, chosen: set[int], hidden_size: int, dtype: torch.dtype
) -> None:
    needs = op not in (EditOp.SCALE, EditOp.ABLATE)
    edit = Edit(op, factor, data_of(vector(1, hidden_size)) if needs else None, max_norm=max_norm)
    made = Intervention.at(runs_of(sorted(chosen)), 1, edit)
    before = torch.randn(LENGTH, hidden_size, generator=torch.Generator().manual_seed(2)).to(dtype)
    found, wanted, row = before.clone(), before.clone(), row_with(made)
    BoundaryActions([row], put_each(CPU), CpuStreams(), as_tensor).act(row, 1, found)
    for position in chosen:
        apply_edit(wanted[position - FIRST : position - FIRST + 1], edit)
    assert torch.equal(found, wanted)


@given(chosen=(EVERY | ANY).filter(bool))
def test_a_capture_has_the_chosen_positions_and_keeps_them(chosen: set[int]) -> None:
    record = Record(1, "bp", runs_of(sorted(chosen)))
    row = row_with(record)
    hidden = torch.arange(LENGTH * 2.0).view(LENGTH, 2)
    actions = BoundaryActions([row], put_each(CPU), CpuStreams(), as_tensor)
    actions.act(row, 1, hidden)
    hidden.zero_()
    [captured] = actions.captured[row]
    assert isinstance(captured.hidden, HostTensor)
    positions, token_ids, seen = captured.positions, captured.token_ids, captured.hidden.tensor
    assert positions == tuple(sorted(chosen)) == tuple(positions_of(record.runs))
    assert token_ids == tuple(100 + position for position in positions)
    assert seen[:, 0].tolist() == [2.0 * (position - FIRST) for position in positions]


SESSIONS = 3 * LEAST_ROWS
blocks = st.lists(st.integers(0, 400), max_size=20)
changes = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 400)),
    st.tuples(st.just("drop"), st.integers(0, 20)),
    st.tuples(st.just("replace"), st.integers(0, 400)),
    st.tuples(st.just("move"), blocks),
)
steps = st.lists(
    st.tuples(st.lists(st.integers(0, SESSIONS - 1), min_size=1, unique=True), st.lists(changes, max_size=6)),
    min_size=1,
    max_size=8,
)


def change(sequence: TokenSequence, what: str, value: Any) -> None:
    """As blocks are reserved, given up, written to by one of two that share them, and brought back."""
    if what == "append":
        sequence.blocks += [value]
    elif what == "drop":
        del sequence.blocks[value:]
    elif what == "replace":
        sequence.blocks[-1:] = [value]
    else:
        sequence.blocks = list(value)


@given(st.lists(blocks, min_size=SESSIONS, max_size=SESSIONS), steps)
def test_any_steps_find_the_blocks_of_their_sequences(
    held: list[list[int]], taken: list[tuple[list[int], list[tuple[str, Any]]]]
) -> None:
    sequences = [TokenSequence(SessionId(str(n)), b"", blocks=list(each)) for n, each in enumerate(held)]
    tables = Batches(4)
    for numbers, changed in taken:
        for place, (what, value) in enumerate(changed):
            change(sequences[numbers[place % len(numbers)]], what, value)
        members = [sequences[number] for number in numbers]
        found = tables.tables_of(members)
        assert found.shape == (len(members), max(len(each.blocks) for each in members))
        for row, member in zip(found.tolist(), members, strict=True):
            assert row == member.blocks + [0] * (len(row) - len(member.blocks))
