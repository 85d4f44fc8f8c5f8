"""What `capture` breakpoints record while turns run on, against Transformers' hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from app.domain.breakpoints import Action, Edit, EditOp, Pass, When
from app.messages import ClearCaptures
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import greedy, tensor_of
from tests.gpu.models.oracle import expect

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(6, 11)
COUNT = 7


@pytest.fixture
def driver(tiny_gpt2: TinyModel) -> BreakDriver:
    return BreakDriver(tiny_gpt2.engine())


def boundaries(oracle: Any, tokens: list[int]) -> list[Tensor]:
    with torch.no_grad():
        return expect(oracle, torch.tensor(tokens)).boundaries


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4


def test_every_pass_is_recorded_and_the_tokens_stay(driver: BreakDriver, tiny_gpt2: TinyModel) -> None:
    session = driver.open()
    made = driver.arm(session, 3, 11, action=Action.CAPTURE)
    turn = driver.begin(session, START, COUNT)
    driver.settle(turn)
    assert turn.tokens == greedy(tiny_gpt2.oracle, START, COUNT)
    found, history = driver.captures(session), START + turn.tokens
    wanted = boundaries(tiny_gpt2.oracle, history)
    passes = [tuple(range(11)), *[(position,) for position in range(11, 17)]]
    assert [record.positions for record in found.records if record.layer == 3] == passes
    assert [record.positions for record in found.records if record.layer == 11] == passes
    for record in found.records:
        assert record.breakpoint == made.id
        assert list(record.token_ids) == [history[position] for position in record.positions]
        assert_close(tensor_of(record.tensor), wanted[record.layer + 1][list(record.positions)])
    assert found.dropped == 0


def test_only_matching_positions_are_recorded(driver: BreakDriver, tiny_gpt2: TinyModel) -> None:
    session = driver.open()
    driver.arm(session, 5, action=Action.CAPTURE, when=When(every=4))
    driver.arm(session, 2, action=Action.CAPTURE, when=When(Pass.PREFILL, token_id=START[5]))
    turn = driver.begin(session, START, COUNT)
    driver.settle(turn)
    found = driver.captures(session).records
    wanted = boundaries(tiny_gpt2.oracle, START + turn.tokens)
    assert [record.positions for record in found if record.layer == 5] == [(0, 4, 8), (12,), (16,)]
    with_token = tuple(position for position, token in enumerate(START) if token == START[5])
    assert [record.positions for record in found if record.layer == 2] == [with_token]
    for record in found:
        assert_close(tensor_of(record.tensor), wanted[record.layer + 1][list(record.positions)])


def test_once_is_one_pass(driver: BreakDriver) -> None:
    session = driver.open()
    made = driver.arm(session, 5, action=Action.CAPTURE, when=When(Pass.DECODE), once=True)
    driver.settle(driver.begin(session, START, COUNT))
    assert [record.positions for record in driver.captures(session).records] == [(11,)]
    assert [spent.breakpoint for spent in driver.spent] == [made.id]


def test_captures_of_a_turn_that_pauses_are_recorded_once(driver: BreakDriver) -> None:
    session = driver.open()
    driver.arm(session, 5, action=Action.CAPTURE)
    driver.arm(session, 3, 5, 7)
    turn = driver.begin(session, START, 3)
    driver.run(turn)
    assert [r.positions for r in driver.captures(session).records] == [tuple(range(11)), (11,), (12,)]


def test_clearing_leaves_the_breakpoint_armed(driver: BreakDriver) -> None:
    session = driver.open()
    driver.arm(session, 5, action=Action.CAPTURE)
    driver.settle(driver.begin(session, START, 2))
    assert driver.captures(session).records
    driver.do(ClearCaptures(driver.ticket(), session))
    assert driver.captures(session).records == ()
    driver.settle(driver.begin(session, [4], 1))
    assert len(driver.captures(session).records) == 1


def test_what_finds_no_room_is_counted(driver: BreakDriver, tiny_gpt2: TinyModel) -> None:
    session = driver.open()
    [sequence] = driver.engine._handler.sequences
    sequence.captures.max_bytes = 5 * len(START) * tiny_gpt2.hidden_size * 4
    driver.arm(session, *range(12), action=Action.CAPTURE)
    turn = driver.begin(session, START, COUNT)
    driver.settle(turn)
    assert turn.tokens == greedy(tiny_gpt2.oracle, START, COUNT)
    found = driver.captures(session)
    assert [(record.layer, len(record.positions)) for record in found.records] == [(k, len(START)) for k in range(5)]
    assert found.dropped == 7 + 12 * (COUNT - 1)
    driver.do(ClearCaptures(driver.ticket(), session))
    assert driver.captures(session).dropped == 0
    driver.settle(driver.begin(session, [4], 1))
    assert len(driver.captures(session).records) == 12


def test_a_capture_beside_an_edit_has_what_the_next_layer_reads(driver: BreakDriver, tiny_gpt2: TinyModel) -> None:
    session = driver.open()
    driver.arm(session, 5, action=Action.EDIT, edits=(Edit(EditOp.SCALE, factor=0.5),))
    driver.arm(session, 5, action=Action.CAPTURE, when=When(Pass.PREFILL))
    driver.settle(driver.begin(session, START, 1))
    [record] = driver.captures(session).records
    assert_close(tensor_of(record.tensor), boundaries(tiny_gpt2.oracle, START)[6] * 0.5)
