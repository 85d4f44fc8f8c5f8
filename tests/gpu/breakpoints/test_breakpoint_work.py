"""What the breakpoints of one session may do in a step that all sessions wait for."""

from itertools import pairwise

import pytest

from app.domain.breakpoints import MAX_WORK, STEP_WORK, Intervention, When
from app.gpu.planning.queue import StepPlan
from app.gpu.state.paths import Record, work_of
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import greedy

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = (0, 1, 2, 3)
LONG = prompt(21, 97)
SHORT = prompt(22, 5)


def operations(plan: StepPlan) -> int:
    """Edits and captures that the step makes, whatever number of positions they are for."""
    steps = [step for row in plan.rows for step in row.path.steps]
    return sum(isinstance(step, Intervention | Record) for step in steps)


def assert_bounded(driver: BreakDriver) -> None:
    """No step has more than it may, or it has one row with work."""
    for plan in driver.plans:
        works = [work_of(row.path.reached) for row in plan.rows if row.path.steps]
        assert sum(works) <= STEP_WORK or len(works) == 1
        assert operations(plan) <= MAX_WORK


def in_steps(driver: BreakDriver, turn: Turn) -> list[int]:
    """The steps that have a row of the turn's session."""
    sessions = [{row.sequence.session for row in plan.rows} for plan in driver.plans]
    return [number for number, found in enumerate(sessions) if turn.session in found]


def test_sessions_that_want_more_than_a_step_take_turns_and_others_have_every_step(tiny_llama: TinyModel) -> None:
    driver, count = BreakDriver(tiny_llama.engine(max_step_tokens=128)), 8
    plain = driver.begin(driver.open(), SHORT, 60)
    sessions = [driver.open() for _ in range(2)]
    for session in sessions:
        driver.arm_all(session, When(every=2))
    busy = [driver.begin(session, LONG, count) for session in sessions]
    driver.settle(plain, *busy)
    last = max(in_steps(driver, turn)[-1] for turn in busy)
    assert_bounded(driver)
    assert set(range(last + 1)) <= set(in_steps(driver, plain))
    for turn in busy:
        steps = in_steps(driver, turn)
        assert max(after - before for before, after in pairwise(steps)) <= 2
        assert turn.tokens == greedy(tiny_llama.oracle, LONG, count)
    assert plain.tokens == greedy(tiny_llama.oracle, SHORT, 60)


@pytest.mark.parametrize("every", [1, 2])
def test_a_prompt_that_wants_more_than_a_step_comes_in_shorter_parts(tiny_llama: TinyModel, every: int) -> None:
    driver = BreakDriver(tiny_llama.engine(max_step_tokens=128))
    session = driver.open()
    driver.arm_all(session, When(every=every))
    driver.arm(session, LAYERS[-1])  # it pauses when all edits are made
    turn = driver.begin(session, LONG, 3)
    parts = [(place.first, place.end) for place in driver.run(turn)]
    assert_bounded(driver)
    assert parts[0] == (0, min(len(LONG), STEP_WORK // MAX_WORK * every))
    assert [first for first, _ in parts[1:]] == [end for _, end in parts[:-1]]
    assert turn.tokens == greedy(tiny_llama.oracle, LONG, 3)
