"""A step is cut into segments where a row leaves or joins. A context knows the edits that it will be computed with."""

from collections.abc import Callable

import pytest

from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Intervention, Pass, When
from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.state.paths import expected_edits
from app.gpu.state.sequence import TokenSequence, TurnState
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import greedy

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 12


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
