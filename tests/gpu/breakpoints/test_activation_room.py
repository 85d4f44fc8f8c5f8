"""How much memory the checkpoints and captures of all sessions may take, and what becomes of those without room."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.domain.activations import PausedTurn
from app.domain.breakpoints import Action, Edit, EditOp, Pass, Until, When
from app.domain.errors import ActivationsFull
from app.domain.values import KVPolicy, SessionId
from app.messages import ClearCaptures, Export, Fork, Import, ReadPaused, Reinstate
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import greedy

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(5, 12)
COUNT = 3
LAYER = 2


@pytest.fixture
def row_bytes(tiny_llama: TinyModel) -> int:
    """Of one position's residual stream."""
    return tiny_llama.hidden_size * 4


def driver_with(model: TinyModel, rows: int, row_bytes: int) -> BreakDriver:
    """With room for so many positions."""
    return BreakDriver(model.engine(max_activation_bytes=rows * row_bytes))


def paused(driver: BreakDriver, session: SessionId) -> Turn:
    """A turn that waits at its prompt. Raises the error that ends it."""
    driver.arm(session, LAYER, when=When(Pass.PREFILL))
    turn = driver.begin(session, START, COUNT)
    driver.settle(turn)
    assert turn.paused
    return turn


def test_captures_of_all_sessions_share_the_room_and_turns_go_on_without(tiny_llama: TinyModel, row_bytes: int) -> None:
    driver = driver_with(tiny_llama, 2 * len(START) + 2, row_bytes)
    sessions = [driver.open() for _ in range(3)]
    for session in sessions:
        driver.arm(session, LAYER, action=Action.CAPTURE, when=When(Pass.PREFILL))
        turn = driver.begin(session, START, COUNT)
        driver.settle(turn)
        assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT)
    found = [driver.captures(session) for session in sessions]
    assert [(len(each.records), each.dropped) for each in found] == [(1, 0), (1, 0), (0, 1)]
    driver.do(ClearCaptures(driver.ticket(), sessions[0]))
    driver.close(sessions[1])
    for number in range(2):
        driver.settle(driver.begin(sessions[2], prompt(7 + number, 12), 1))
    assert len(driver.captures(sessions[2]).records) == 2


def test_a_pause_without_room_ends_its_turn_and_leaves_the_history(tiny_llama: TinyModel, row_bytes: int) -> None:
    driver = driver_with(tiny_llama, 2 * len(START) - 1, row_bytes)
    first, second = driver.open(), driver.open()
    waits = paused(driver, first)
    with pytest.raises(ActivationsFull, match="max_activation_bytes") as refused:
        paused(driver, second)
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (429, "activations_full", 1)
    assert driver.place(second).tokens == 0
    driver.edit(waits, Edit(EditOp.SCALE, 1.0))
    driver.run(waits, Until(end=True))
    assert waits.tokens == greedy(tiny_llama.oracle, START, COUNT)
    paused(driver, second)


def test_a_turn_that_pauses_again_needs_no_more_room(tiny_llama: TinyModel, row_bytes: int) -> None:
    driver = driver_with(tiny_llama, len(START), row_bytes)
    session = driver.open()
    driver.arm(session, 0, 1, 2)
    turn = driver.begin(session, START, COUNT)
    assert len(driver.run(turn)) == 3 * COUNT
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT)


def test_a_tenant_leaves_as_much_as_it_takes(tiny_llama: TinyModel, row_bytes: int) -> None:
    driver = driver_with(tiny_llama, 4 * len(START), row_bytes)
    for _ in range(2):
        paused(driver, driver.open("many"))
    with pytest.raises(ActivationsFull, match="of this tenant, who leaves others as much"):
        paused(driver, driver.open("many"))
    for number in range(2):
        paused(driver, driver.open(f"other-{number}"))
    with pytest.raises(ActivationsFull):
        paused(driver, driver.open("late"))


def test_copies_of_a_paused_session_need_room(tiny_llama: TinyModel, row_bytes: int, tmp_path: Path) -> None:
    rows = 2 * len(START) - 1
    driver = BreakDriver(
        tiny_llama.engine(
            host_blocks=200, policy=KVPolicy.SIGNAL, kv_dir=tmp_path / "kv", max_activation_bytes=rows * row_bytes
        )
    )
    session, child, imported = driver.open(), SessionId("child"), SessionId("imported")
    turn = paused(driver, session)
    with pytest.raises(ActivationsFull):
        driver.do(Fork(driver.ticket(), session, child, driver.ticket()))
    read, path = driver.do(ReadPaused(driver.ticket(), session)), str(tmp_path / "session.kv")
    assert isinstance(read, PausedTurn)
    driver.do(Export(driver.ticket(), session, path, "{}"))
    driver.do(Import(driver.ticket(), imported, path, ""))
    with pytest.raises(ActivationsFull):
        driver.do(Reinstate(driver.ticket(), imported, paused=read, turn=driver.ticket()))
    driver.cancel(turn)
    driver.do(Reinstate(driver.ticket(), imported, paused=read, turn=driver.ticket()))
