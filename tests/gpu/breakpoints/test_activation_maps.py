"""Maps of what a session keeps, against Transformers' hidden states under its own norm and head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.domain.activations import ActivationMap, ActivationNorms, LensRows
from app.domain.breakpoints import ALL, LAST, Action, Edit, EditOp, Positions, When
from app.domain.errors import FieldOutOfRange, WrongState
from app.messages import ClearCaptures, CloseMap, EditCheckpoint, Lens, MapLens, OpenMap, ReadNorms, Rewind
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import tensor_of
from tests.gpu.models.oracle import expect

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(6, 11)
LAYERS = range(12)


@pytest.fixture
def driver(tiny_gpt2: TinyModel) -> BreakDriver:
    return BreakDriver(tiny_gpt2.engine())


def open_map(
    driver: BreakDriver, session: Any, positions: Positions = ALL, layers: tuple[int, ...] | None = None
) -> ActivationMap:
    found = driver.do(OpenMap(driver.ticket(), session, positions, layers))
    assert isinstance(found, ActivationMap)
    return found


def lens(driver: BreakDriver, session: Any, first: int, end: int, top_k: int = 1) -> LensRows:
    found = driver.do(MapLens(driver.ticket(), session, first, end, top_k))
    assert isinstance(found, LensRows)
    return found


def says(oracle: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of Transformers' own norm and head, `[rows, vocab]`."""
    with torch.no_grad():
        logits = oracle.lm_head(oracle.transformer.ln_f(hidden))
    return torch.log_softmax(logits, dim=-1)


def boundaries(oracle: Any, tokens: list[int]) -> list[torch.Tensor]:
    with torch.no_grad():
        return expect(oracle, torch.tensor(tokens)).boundaries


def captured(driver: BreakDriver, *layers: int, when: When | None = None, tokens: int = 1) -> tuple[Any, list[int]]:
    """A session that has captured the layers in a turn, and its history."""
    session = driver.open()
    driver.arm(session, *layers, action=Action.CAPTURE, when=when or When())
    turn = driver.begin(session, START, tokens)
    driver.settle(turn)
    return session, START + turn.tokens


def test_the_lens_of_each_layer_is_that_of_transformers(driver: BreakDriver, tiny_gpt2: TinyModel) -> None:
    session, history = captured(driver, *LAYERS, tokens=5)
    found = open_map(driver, session)
    assert (found.first, found.end, found.kept_first, found.kept_end) == (0, 15, 0, 15)
    assert list(found.token_ids) == history[:15]
    assert [(each.layer, each.positions) for each in found.layers] == [(k, tuple(range(15))) for k in LAYERS]
    rows = [row for begin in range(0, found.count, 7) for row in lens(driver, session, begin, begin + 7, 3).rows]
    wanted = boundaries(tiny_gpt2.oracle, history)
    for layer in LAYERS:
        best = says(tiny_gpt2.oracle, wanted[layer + 1][:15]).topk(3)
        for position, top in enumerate(rows[15 * layer : 15 * (layer + 1)]):
            assert [token for token, _ in top] == best.indices[position].tolist()
            assert [logprob for _, logprob in top] == pytest.approx(best.values[position].tolist(), abs=1e-3)


def test_a_paused_layer_is_read_as_it_was_edited(driver: BreakDriver) -> None:
    """The map equals the lens of the checkpoint there, though a capture at the same layer is older."""
    session = driver.open()
    driver.arm(session, 3, 5, action=Action.CAPTURE)
    driver.arm(session, 5)
    turn = driver.begin(session, START, 3)
    driver.settle(turn)
    driver.do(EditCheckpoint(driver.ticket(), session, (Edit(EditOp.SCALE, factor=-2.0),)))
    found = open_map(driver, session, Positions(4, 11))
    assert [each.layer for each in found.layers] == [3, 5]
    single: Any = driver.do(Lens(driver.ticket(), session, Positions(4, 11), 2))
    assert list(lens(driver, session, 7, 14, 2).rows) == [each.top for each in single.positions]


def test_what_was_kept_when_the_map_was_opened_is_read(driver: BreakDriver) -> None:
    session, _ = captured(driver, 2, 4)
    found = open_map(driver, session)
    before = lens(driver, session, 0, found.count).rows
    driver.do(ClearCaptures(driver.ticket(), session))
    driver.settle(driver.begin(session, [4, 5], 2))
    assert lens(driver, session, 0, found.count).rows == before
    driver.do(CloseMap(driver.ticket(), session))
    with pytest.raises(WrongState, match="no map"):
        lens(driver, session, 0, 1)


def test_positions_and_layers_are_chosen(driver: BreakDriver) -> None:
    session, _ = captured(driver, 1, 2, 3, when=When(every=3), tokens=5)
    found = open_map(driver, session, Positions(2, 8), (2, 3, 9))
    assert (found.kept_first, found.kept_end) == (0, 13)
    assert [(each.layer, each.positions) for each in found.layers] == [(2, (3, 6)), (3, (3, 6))]
    last = open_map(driver, session, LAST)
    assert (last.first, last.end, last.layers[0].positions) == (12, 13, (12,))


def test_a_session_that_keeps_nothing_has_an_empty_map(driver: BreakDriver) -> None:
    session = driver.open()
    for positions in (ALL, LAST):
        found = open_map(driver, session, positions)
        assert (found.first, found.end, found.kept_end, found.layers) == (0, 0, 0, ())


@pytest.mark.parametrize("positions", [Positions(0, 1000), Positions(100, 101), Positions(0, 65)])
def test_positions_must_be_in_the_history_and_not_too_many(driver: BreakDriver, positions: Positions) -> None:
    session = driver.open()
    driver.settle(driver.begin(session, prompt(3, 70), 1))
    with pytest.raises(FieldOutOfRange, match="positions"):
        open_map(driver, session, positions)


def test_what_a_rewind_has_cut_off_is_not_on_the_map(driver: BreakDriver, tiny_gpt2: TinyModel) -> None:
    """Not even where the new history has the same token at the same position."""
    session, history = captured(driver, 6)
    driver.do(Rewind(driver.ticket(), session, 4))
    assert [each.positions for each in open_map(driver, session).layers] == [(0, 1, 2, 3)]
    other = [(history[4] + 1) % 60 + 3, *history[5:9]]
    driver.settle(driver.begin(session, other, 1))
    found = open_map(driver, session)
    assert found.layers[0].positions == tuple(range(9))
    best = says(tiny_gpt2.oracle, boundaries(tiny_gpt2.oracle, history[:4] + other)[7]).max(dim=-1).values
    assert [top[0][1] for top in lens(driver, session, 0, 9).rows] == pytest.approx(best.tolist(), abs=1e-3)


def test_norms_and_cosines_are_those_of_the_captures(driver: BreakDriver) -> None:
    session, _ = captured(driver, 2, 7)
    tensors = {each.layer: tensor_of(each.tensor).double() for each in driver.captures(session).records}
    direction = driver.captures(session).records[0].tensor.rows(3, 4)
    vector = type(direction)(direction.dtype, direction.shape[1:], direction.data)
    measure: Any = driver.do(ReadNorms(driver.ticket(), session, ALL, None, vector))
    found = measure()
    assert isinstance(found, ActivationNorms)
    for index, layer in enumerate((2, 7)):
        assert found.norms[index] == pytest.approx(tensors[layer].norm(dim=1).tolist())
        assert found.cosines is not None
        wanted = torch.nn.functional.cosine_similarity(tensors[layer], tensors[2][3:4])
        assert found.cosines[index] == pytest.approx(wanted.tolist(), abs=1e-6)
    assert found.cosines is not None
    assert found.cosines[0][3] == pytest.approx(1)
    plain: Any = driver.do(ReadNorms(driver.ticket(), session, ALL, (7,), None))
    assert (plain().norms, plain().cosines) == (found.norms[1:], None)
