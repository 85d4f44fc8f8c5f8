"""Every edit gives exactly the tokens that the same change made by a forward hook in Transformers gives.

What an edit does to numbers is that of loops in plain torch: heads, neurons, lengths and conditions.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from app.domain.breakpoints import ALL, LAST, Action, Edit, EditOp, Gate, Part, PartKind, Pass, Positions, When
from app.domain.errors import FieldOutOfRange
from app.gpu.forward.boundary import apply_edit
from app.gpu.forward.uploads import LoadedUploads
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
    start = [*START[:5], token, *START[5:9], token, *START[9:]]
    driver.arm(session, 0, action=Action.EDIT, edits=(edit,), when=When(every=3))
    driver.arm(session, 2, action=Action.EDIT, edits=(make_edit(EditOp.SCALE, Positions(2, 16)),))
    driver.arm(session, 1, action=Action.EDIT, edits=(edit,), when=When(Pass.PREFILL, token_id=token))
    turn = driver.turn(session, start, COUNT)
    changes = [
        change_of(0, edit, lambda position, _: position % 3 == 0),
        change_of(2, make_edit(EditOp.SCALE), lambda position, _: 2 <= position < 16),
        change_of(1, edit, lambda position, found: position < len(start) and found == token),
    ]
    assert turn.tokens == greedy(tiny_llama.oracle, start, COUNT, changes)


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


NO_UPLOADS = LoadedUploads(torch.device("cpu")).get
POSITIONS, HEADS, HEAD_DIM = 5, 4, 6
WIDTH = HEADS * HEAD_DIM
CHOSEN = {PartKind.HEADS: (1, 3), PartKind.NEURONS: (0, 5, 17)}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HIDDEN, ALONG = numbers(POSITIONS, WIDTH, seed=1), numbers(WIDTH, seed=2)
FIELDS: list[dict[str, object]] = [
    {},
    {"keep_norm": True},
    {"max_norm": 0.75},
    {"gate": Gate(data_of(ALONG), above=0.5)},
    {"gate": Gate(data_of(ALONG), above=-4.0, below=2.0), "keep_norm": True},
]


def by_hand(edit: Edit, vector: Tensor) -> Tensor:
    """The formulas of the documentation, one position and one `h` after the other."""
    places = [torch.arange(WIDTH)]
    if edit.part is not None and edit.part.kind is PartKind.HEADS:
        places = [torch.arange(head * HEAD_DIM, (head + 1) * HEAD_DIM) for head in edit.part.chosen]
    elif edit.part is not None:
        places = [torch.tensor(edit.part.chosen)]
    wanted = HIDDEN.clone()
    for position, place in product(range(POSITIONS), places):
        along = float(HIDDEN[position].double() @ ALONG.double())
        if edit.gate and (along <= (edit.gate.above or 0) or along >= (edit.gate.below or 1e9)):
            continue
        own = vector[place] if len(vector) == WIDTH else vector
        op = EditOp.REPLACE if edit.op is EditOp.ABLATE and edit.vector else edit.op
        before = HIDDEN[position, place]
        after = edited(op, before, edit.factor, own, edit.max_norm)
        wanted[position, place] = after * (before.norm() / after.norm() if edit.keep_norm and after.any() else 1)
    return wanted


@pytest.mark.parametrize("of", ["whole", "part"])
@pytest.mark.parametrize("kind", [None, *CHOSEN])
@pytest.mark.parametrize("op", EditOp)
@pytest.mark.parametrize("fields", FIELDS, ids=["plain", "keep_norm", "max_norm", "above", "between"])
def test_an_edit_is_its_formula(op: EditOp, kind: PartKind | None, fields: dict[str, object], of: str) -> None:
    part = kind and Part(kind, CHOSEN[kind], HEADS if kind is PartKind.HEADS else WIDTH)
    size = WIDTH if of == "whole" or kind is None else HEAD_DIM if kind is PartKind.HEADS else len(CHOSEN[kind])
    vector = 3 * numbers(size, seed=3)
    edit = Edit(op, FACTORS.get(op, 1.0), None if op is EditOp.SCALE else data_of(vector), part=part, **fields)  # type: ignore[arg-type]
    found = HIDDEN.clone()
    apply_edit(found, edit, NO_UPLOADS)
    torch.testing.assert_close(found, by_hand(edit, vector), rtol=1e-5, atol=1e-5)
    if fields.keys() == {"gate"}:
        assert 0 < int((found != HIDDEN).any(1).sum()) < POSITIONS
