"""What breakpoints do to the steps of others: nothing, until a row leaves or joins the batch at its boundary."""

from __future__ import annotations

import pytest

from app.domain.breakpoints import Pass, When
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
