"""Tenants share the prompts' tokens of steps in which breakpoints leave rows out."""

from __future__ import annotations

from math import ceil

import pytest

from app.domain.breakpoint_work import MAX_WORK
from app.domain.breakpoints import Action, Edit, EditOp, When
from app.domain.values import SessionId
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = (0, 1, 2, 3)
EDITS = tuple(Edit(EditOp.SCALE, 1.0) for _ in range(16))
STEP_TOKENS, LENGTH, DECODING = 16, 60, 8


def open_busy(driver: BreakDriver) -> SessionId:
    """A session of the tenant `busy` that does all in each of its rows that a step has room for."""
    session = driver.open("busy")
    for _ in range(MAX_WORK // (len(LAYERS) * len(EDITS))):
        driver.arm(session, *LAYERS, action=Action.EDIT, edits=EDITS, when=When())
    return session


@pytest.mark.parametrize("length", [LENGTH // 2, LENGTH, 2 * LENGTH])
def test_a_prompt_that_finds_no_room_for_its_breakpoints_takes_no_tokens_from_another_tenant(
    tiny_llama: TinyModel, length: int
) -> None:
    driver = BreakDriver(tiny_llama.engine(max_step_tokens=STEP_TOKENS))
    decoding = [driver.begin(open_busy(driver), prompt(number, 2), 100) for number in range(DECODING)]
    while not all(turn.tokens for turn in decoding):
        driver.take(driver.engine.step())
    for number in range(2):
        driver.begin(open_busy(driver), prompt(50 + number, length), 1)
    plain = driver.begin(driver.open("plain"), prompt(99, LENGTH), 1)
    steps = 0
    while not plain.tokens:
        driver.take(driver.engine.step())
        steps += 1
    assert steps <= 2 * ceil(LENGTH / (STEP_TOKENS - 1)) + 2  # half of them could be the other tenant's
    assert all(len(turn.tokens) < 100 for turn in decoding)
