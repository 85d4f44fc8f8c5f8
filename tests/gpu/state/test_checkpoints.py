"""What a paused turn has left: read, written back, seen through the lens, all against Transformers' hidden states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from app.domain.activations import CheckpointLens, LensPosition
from app.domain.breakpoints import ALL, LAST, Pass, Positions, TensorData, Until, When
from app.domain.errors import FieldOutOfRange, WrongState
from app.messages import Lens, ReadCheckpoint, WriteCheckpoint
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import Change, data_of, greedy
from tests.gpu.models.oracle import expect

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(4, 14)
SHAPES = ["tiny_gpt2", "tiny_mistral", "tiny_llama"]


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> TinyModel:
    found: TinyModel = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def driver(tiny_llama: TinyModel) -> BreakDriver:
    return BreakDriver(tiny_llama.engine())


def boundaries(oracle: Any, tokens: list[int]) -> list[Tensor]:
    """Before every layer, and after the last one; `[tokens, hidden]` each."""
    with torch.no_grad():
        return expect(oracle, torch.tensor(tokens)).boundaries


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4


def pause(driver: BreakDriver, layer: int, in_pass: Pass = Pass.ANY, count: int = 6) -> Turn:
    session = driver.open()
    driver.arm(session, layer, when=When(in_pass))
    turn = driver.begin(session, START, count)
    driver.settle(turn)
    return turn


def test_checkpoints_are_transformers_hidden_states_at_every_layer(model: TinyModel) -> None:
    driver = BreakDriver(model.engine())
    session = driver.open()
    driver.arm(session, *range(model.num_layers))
    turn = driver.begin(session, START, 4)
    found: dict[tuple[int, int], Tensor] = {}
    driver.settle(turn)
    while turn.paused:
        found[turn.checkpoint.layer, turn.checkpoint.first] = driver.read(turn)
        driver.resume(turn)
        driver.settle(turn)
    wanted = boundaries(model.oracle, START + turn.tokens)
    assert len(found) == model.num_layers * 4
    for (layer, first), activation in found.items():
        end = len(START) if first == 0 else first + 1
        assert_close(activation, wanted[layer + 1][first:end])


def test_some_positions_are_read(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    turn = pause(driver, 2)
    wanted = boundaries(tiny_llama.oracle, START)[3]
    for positions, part in (
        (ALL, wanted),
        (LAST, wanted[-1:]),
        (Positions(3, 7), wanted[3:7]),
        (Positions(9), wanted[9:]),
    ):
        assert_close(driver.read(turn, positions), part)


@pytest.mark.parametrize("positions", [Positions(0, 15), Positions(14, 15), Positions(20, 22), Positions(14)])
def test_positions_outside_the_checkpoint_are_refused(driver: BreakDriver, positions: Positions) -> None:
    turn = pause(driver, 1)
    with pytest.raises(FieldOutOfRange) as caught:
        driver.read(turn, positions)
    assert caught.value.param == "positions"


def test_a_decode_checkpoint_has_one_position(driver: BreakDriver) -> None:
    turn = pause(driver, 1, Pass.DECODE)
    assert driver.read(turn, Positions(14, 15)).shape == driver.read(turn).shape == (1, 48)
    with pytest.raises(FieldOutOfRange):
        driver.read(turn, Positions(0, 14))


def test_what_is_written_back_unchanged_changes_nothing(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    session = driver.open()
    driver.arm(session, 1, 2)
    turn = driver.begin(session, START, 6)
    driver.settle(turn)
    while turn.paused:
        driver.do(WriteCheckpoint(driver.ticket(), session, data_of(driver.read(turn))))
        driver.resume(turn)
        driver.settle(turn)
    assert turn.tokens == greedy(tiny_llama.oracle, START, 6)


@pytest.mark.parametrize("in_pass", [Pass.PREFILL, Pass.DECODE])
def test_another_residual_stream_takes_the_place_of_the_first(
    driver: BreakDriver, tiny_llama: TinyModel, in_pass: Pass
) -> None:
    turn = pause(driver, 1, in_pass)
    checkpoint = turn.checkpoint
    written = torch.stack([vector(position, 48) for position in range(checkpoint.first, checkpoint.end)])
    driver.do(WriteCheckpoint(driver.ticket(), turn.session, data_of(written)))
    assert torch.equal(driver.read(turn), written)
    driver.run(turn, Until(end=True))
    rows = iter(written)
    change = Change(1, lambda _: next(rows), lambda position, _: checkpoint.first <= position < checkpoint.end)
    wanted = greedy(tiny_llama.oracle, START, 6, [change])
    assert turn.tokens == wanted
    assert wanted != greedy(tiny_llama.oracle, START, 6)


def test_a_residual_stream_of_other_positions_is_refused(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    turn = pause(driver, 1, Pass.PREFILL)
    before = driver.read(turn)
    with pytest.raises(FieldOutOfRange, match="14"):
        driver.do(WriteCheckpoint(driver.ticket(), turn.session, data_of(before[:5])))
    assert torch.equal(driver.read(turn), before)
    driver.run(turn)
    assert turn.tokens == greedy(tiny_llama.oracle, START, 6)


def test_there_is_no_checkpoint_while_nothing_is_paused(driver: BreakDriver) -> None:
    turn = pause(driver, 1, Pass.PREFILL)
    driver.run(turn)
    tensor = TensorData("float32", (1, 48), bytes(4 * 48))
    for command in (
        ReadCheckpoint(driver.ticket(), turn.session, ALL),
        WriteCheckpoint(driver.ticket(), turn.session, tensor),
        Lens(driver.ticket(), turn.session, LAST, 3),
    ):
        with pytest.raises(WrongState):
            driver.do(command)


def test_the_lens_is_transformers_head_on_its_hidden_states(model: TinyModel) -> None:
    driver, layer = BreakDriver(model.engine()), model.num_layers // 2
    turn = pause(driver, layer, Pass.PREFILL)
    found = driver.do(Lens(driver.ticket(), turn.session, Positions(2, 9), 4))
    assert isinstance(found, CheckpointLens)
    decoder, hidden = model.oracle.get_decoder(), boundaries(model.oracle, START)[layer + 1]
    with torch.no_grad():
        normed = (decoder.ln_f if hasattr(decoder, "ln_f") else decoder.norm)(hidden)
        wanted = torch.log_softmax(model.oracle.get_output_embeddings()(normed), dim=-1)
    assert [(entry.position, entry.token_id) for entry in found.positions] == [(p, START[p]) for p in range(2, 9)]
    for entry in found.positions:
        _assert_top(entry, wanted[entry.position], 4)
    driver.run(turn)
    assert turn.tokens == greedy(model.oracle, START, 6)


def test_the_lens_on_the_last_layer_is_what_the_model_says(driver: BreakDriver) -> None:
    turn = pause(driver, 3)
    found = driver.do(Lens(driver.ticket(), turn.session, LAST, 1))
    assert isinstance(found, CheckpointLens)
    [entry] = found.positions
    driver.resume(turn)
    driver.settle(turn)
    assert [entry.top[0][0]] == turn.tokens
    assert math.isfinite(entry.top[0][1])


def _assert_top(entry: LensPosition, wanted: Tensor, count: int) -> None:
    values, ids = wanted.topk(count)
    assert [token for token, _ in entry.top] == ids.tolist()
    assert [logprob for _, logprob in entry.top] == pytest.approx(values.tolist(), abs=1e-3)
