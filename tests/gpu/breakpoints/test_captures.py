"""What sessions keep of their passes, maps of it against Transformers, and how much memory all of it may take."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.domain.activations import ActivationMap, LensAsk, LensRows, PausedTurn
from app.domain.breakpoints import ALL, LAST, Action, Edit, EditOp, Pass, Positions, When
from app.domain.errors import ActivationsFull, WrongState
from app.domain.values import KVPolicy, SessionId
from app.messages import ClearCaptures, Export, Fork, Import, Lens, MapLens, OpenMap, ReadPaused, Reinstate, Rewind
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import boundaries, greedy

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(6, 11)
COUNT = 7
LAYERS = range(12)


@pytest.fixture
def driver(tiny_gpt2: TinyModel) -> BreakDriver:
    return BreakDriver(tiny_gpt2.engine())


def capturing(driver: BreakDriver, *layers: int) -> SessionId:
    return driver.open_armed(*layers, action=Action.CAPTURE)


def open_map(
    driver: BreakDriver, session: SessionId, positions: Positions = ALL, layers: tuple[int, ...] | None = None
) -> ActivationMap:
    found = driver.do(OpenMap(driver.ticket(), session, positions, layers))
    assert isinstance(found, ActivationMap)
    return found


def lens(driver: BreakDriver, session: SessionId, top_k: int = 1) -> LensRows:
    found = driver.do(MapLens(driver.ticket(), session, LensAsk(top_k)))
    assert isinstance(found, LensRows)
    return found


@pytest.mark.parametrize("end", [open_map, BreakDriver.close])
def test_a_look_ends_with_its_map(driver: BreakDriver, end: Callable[[BreakDriver, SessionId], object]) -> None:
    session = capturing(driver, 3)
    driver.turn(session, START, 1)
    open_map(driver, session)
    driver.engine.handle(MapLens(driver.ticket(), session, LensAsk(1)))
    with pytest.raises(WrongState, match="closed meanwhile"):
        end(driver, session)


def says(oracle: Any, hidden: Tensor) -> Tensor:
    """Log-probabilities of Transformers' own norm and head, `[rows, vocab]`."""
    with torch.no_grad():
        logits = oracle.lm_head(oracle.transformer.ln_f(hidden))
    return torch.log_softmax(logits, dim=-1)


def test_a_paused_layer_is_read_as_it_was_edited(driver: BreakDriver) -> None:
    """The map equals the lens of the checkpoint there, though a capture at the same layer is older."""
    session = capturing(driver, 3, 5)
    driver.arm(session, 5)
    driver.edit(driver.turn(session, START, 3), Edit(EditOp.SCALE, factor=-2.0))
    assert [each.layer for each in open_map(driver, session, LAST, (3, 9)).layers] == [3]
    found = open_map(driver, session, Positions(4, 11))
    assert [each.layer for each in found.layers] == [3, 5]
    single: Any = driver.do(Lens(driver.ticket(), session, Positions(4, 11), 2))
    assert lens(driver, session, 2).rows[7:14] == single.rows


def test_what_a_rewind_has_cut_off_is_not_on_the_map(driver: BreakDriver, tiny_gpt2: TinyModel) -> None:
    """Not even where the new history has the same token at the same position."""
    session = capturing(driver, 6)
    driver.turn(session, START, 1)
    driver.do(Rewind(driver.ticket(), session, 4))
    assert [each.positions for each in open_map(driver, session).layers] == [(0, 1, 2, 3)]
    other = [(START[4] + 1) % 60 + 3, *START[5:9]]
    driver.turn(session, other, 1)
    found = open_map(driver, session)
    assert found.layers[0].positions == tuple(range(9))
    best = says(tiny_gpt2.oracle, boundaries(tiny_gpt2.oracle, START[:4] + other)[7]).max(dim=-1).values
    assert [top[0][1] for top in lens(driver, session).rows[:9]] == pytest.approx(best.tolist(), abs=1e-3)


LAYER = 2


def driver_with(model: TinyModel, rows: int, **settings: Any) -> BreakDriver:
    """With room for so many positions."""
    return BreakDriver(model.engine(max_activation_bytes=rows * model.hidden_size * 4, **settings))


def paused(driver: BreakDriver, session: SessionId) -> Turn:
    """A turn that waits at its prompt. Raises the error that ends it."""
    driver.arm(session, LAYER, when=When(Pass.PREFILL))
    turn = driver.turn(session, START, COUNT)
    assert turn.paused
    return turn


def test_captures_of_all_sessions_share_the_room_and_turns_go_on_without(tiny_llama: TinyModel) -> None:
    driver = driver_with(tiny_llama, 2 * len(START) + 2)
    sessions = [driver.open() for _ in range(3)]
    for session in sessions:
        driver.arm(session, LAYER, action=Action.CAPTURE, when=When(Pass.PREFILL))
        turn = driver.turn(session, START, COUNT)
        assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT)
    found = [driver.captures(session) for session in sessions]
    assert [(len(each.records), each.dropped) for each in found] == [(1, 0), (1, 0), (0, 1)]
    driver.do(ClearCaptures(driver.ticket(), sessions[0]))
    driver.close(sessions[1])
    for number in range(2):
        driver.turn(sessions[2], prompt(7 + number, len(START)), 1)
    assert len(driver.captures(sessions[2]).records) == 2


def test_a_tenant_leaves_as_much_as_it_takes(tiny_llama: TinyModel) -> None:
    driver = driver_with(tiny_llama, 4 * len(START))
    for _ in range(2):
        paused(driver, driver.open("many"))
    with pytest.raises(ActivationsFull, match="of this tenant, who leaves others as much"):
        paused(driver, driver.open("many"))
    for number in range(2):
        paused(driver, driver.open(f"other-{number}"))
    with pytest.raises(ActivationsFull):
        paused(driver, driver.open("late"))


def exported(driver: BreakDriver, session: SessionId, imported: SessionId, folder: Path) -> PausedTurn:
    """What a paused session has; its history and KV are imported as another one."""
    read, path = driver.do(ReadPaused(driver.ticket(), session)), str(folder / "session.kv")
    assert isinstance(read, PausedTurn)
    driver.do(Export(driver.ticket(), session, path, "{}"))
    driver.do(Import(driver.ticket(), imported, path, ""))
    return read


def test_copies_of_a_paused_session_need_room(tiny_llama: TinyModel, tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"host_blocks": 200, "policy": KVPolicy.SIGNAL, "kv_dir": tmp_path / "kv"}
    driver = driver_with(tiny_llama, 2 * len(START) - 1, **tiers)
    session, child, imported = driver.open(), SessionId("child"), SessionId("imported")
    turn = paused(driver, session)
    with pytest.raises(ActivationsFull):
        driver.do(Fork(driver.ticket(), session, child, driver.ticket()))
    read = exported(driver, session, imported, tmp_path)
    with pytest.raises(ActivationsFull):
        driver.do(Reinstate(driver.ticket(), imported, paused=read, turn=driver.ticket()))
    driver.cancel(turn)
    driver.do(Reinstate(driver.ticket(), imported, paused=read, turn=driver.ticket()))
