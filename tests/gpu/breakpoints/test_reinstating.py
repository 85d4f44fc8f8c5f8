"""Sessions that come from elsewhere: from an export, or from before a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from app.domain.activations import PausedTurn
from app.domain.breakpoints import Action, Edit, EditOp, Pass, TensorData, When
from app.domain.values import KVPolicy, SessionId, Ticket
from app.messages import Disarm, Export, ExportedKV, Import, Open, ReadPaused, Reinstate
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import Where, change_of, data_of, everywhere, greedy, tensor_of
from tests.gpu.breakpoints.breaking_replay import within

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(16, 5 * BLOCK + 1)
COUNT = 8
LAYER = 1
ADD = Edit(EditOp.ADD, 2.0, data_of(2 * vector(3, 48)))
IMPORTED = SessionId("imported")


@pytest.fixture
def driver(tiny_llama: TinyModel, tmp_path: Path) -> BreakDriver:
    return BreakDriver(tiny_llama.engine(host_blocks=200, policy=KVPolicy.SIGNAL, kv_dir=tmp_path / "kv"))


def copy_by_file(driver: BreakDriver, session: SessionId, folder: Path) -> ExportedKV:
    """Export the session and import the file."""
    path = str(folder / "session.kv")
    exported = driver.do(Export(driver.ticket(), session, path, "{}"))
    assert isinstance(exported, ExportedKV)
    driver.do(Import(driver.ticket(), IMPORTED, path, ""))
    return exported


def reinstate(driver: BreakDriver, paused: PausedTurn) -> Turn:
    ticket = driver.ticket()
    driver.do(Reinstate(driver.ticket(), IMPORTED, paused=paused, turn=ticket))
    return Turn(driver.events, IMPORTED, [ticket])


def some_rows(data: TensorData, first: int, end: int) -> TensorData:
    rows: Tensor = tensor_of(data)[first:end]
    return data_of(rows)


def settle_resumed(driver: BreakDriver, turn: Turn) -> None:
    driver.resume(turn)
    driver.settle(turn)


@pytest.mark.parametrize("first", [0, 3, 2 * BLOCK])
@pytest.mark.parametrize("parked", [False, True], ids=["with-kv", "without-kv"])
def test_a_checkpoint_below_the_imported_kv_goes_on_and_harms_nobody(
    tiny_llama: TinyModel, tmp_path: Path, first: int, parked: bool
) -> None:
    """The file of one session with the label of another: both of them are valid."""
    tiers: dict[str, Any] = {} if parked else {"host_blocks": 200, "policy": KVPolicy.SIGNAL, "kv_dir": tmp_path / "kv"}
    driver = BreakDriver(tiny_llama.engine(**tiers))
    whole = driver.open()
    driver.settle(driver.begin(whole, START, 1))
    other = driver.open()
    driver.arm(other, LAYER, when=When(Pass.PREFILL, position=0))
    turn = driver.begin(other, START, COUNT)
    driver.settle(turn)
    paused = driver.do(ReadPaused(driver.ticket(), other))
    assert isinstance(paused, PausedTurn)
    info = replace(paused.checkpoint, first=first, end=first + 5)
    exported = copy_by_file(driver, whole, tmp_path)
    assert exported.computed_tokens == (0 if parked else len(START))
    imported = reinstate(driver, replace(paused, checkpoint=info, hidden=some_rows(paused.hidden, first, first + 5)))
    bystander = driver.begin(driver.open(), prompt(8, 10), 30)
    driver.advance()
    driver.advance()
    settle_resumed(driver, imported)
    driver.settle(bystander)
    assert bystander.tokens == greedy(tiny_llama.oracle, prompt(8, 10), 30)
    assert imported.tokens == greedy(tiny_llama.oracle, START, COUNT)[1:]
    driver.run(turn)
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT)


@pytest.mark.parametrize("host_blocks", [200, 2, 0])
@pytest.mark.parametrize("disarmed", [False, True])
def test_an_import_keeps_its_steering_whatever_of_its_kv_came_along(
    tiny_llama: TinyModel, tmp_path: Path, host_blocks: int, disarmed: bool
) -> None:
    policy = KVPolicy.SIGNAL if host_blocks else KVPolicy.NONE
    driver = BreakDriver(tiny_llama.engine(host_blocks=host_blocks, policy=policy, kv_dir=tmp_path / "kv"))
    session = driver.open()
    armed = driver.arm(session, LAYER, action=Action.EDIT, edits=(ADD,))
    turn = driver.begin(session, START, 4)
    driver.settle(turn)
    if disarmed:
        driver.do(Disarm(driver.ticket(), session, armed.id))
    exported = copy_by_file(driver, session, tmp_path)
    assert (exported.computed_tokens > 0) is (host_blocks == 200)
    made = turn.end.interventions
    assert made
    driver.do(Reinstate(driver.ticket(), IMPORTED, () if disarmed else (armed,), made))
    history = START + turn.tokens
    where: Where = (lambda position, _: position < len(history) - 1) if disarmed else everywhere
    wanted = greedy(tiny_llama.oracle, [*history, 5, 6, 7], COUNT, [change_of(LAYER, ADD, where)])
    for each in (session, IMPORTED):
        again = driver.begin(each, [5, 6, 7], COUNT)
        driver.settle(again)
        assert again.tokens == wanted


@pytest.mark.parametrize("news", [[], [7]])
def test_a_turn_that_generated_nothing_is_steered_to_its_end_after_a_restart(
    driver: BreakDriver, tiny_llama: TinyModel, news: list[int]
) -> None:
    """Nobody has computed the last token of most histories; here somebody has."""
    session = driver.open()
    armed = driver.arm(session, LAYER, action=Action.EDIT, edits=(ADD,))
    before = driver.begin(session, START, 0)
    driver.settle(before)
    made = before.end.interventions
    assert made
    restarted, again = BreakDriver(tiny_llama.engine()), SessionId("again")
    opened = Open(Ticket(10**6), again, token_ids=tuple(START), breakpoints=(armed,), interventions=made)
    restarted.do(opened)
    ends = []
    for each, name in ((driver, session), (restarted, again)):
        each.do(Disarm(each.ticket(), name, armed.id))
        turn = each.begin(name, news, COUNT)
        each.settle(turn)
        steered = min(len(START), len(START) + len(news) - 1)  # the last of a context is computed from scratch
        change = change_of(LAYER, ADD, within(0, steered))
        assert turn.tokens == greedy(tiny_llama.oracle, START + news, COUNT, [change])
        ends.append(turn.end.interventions)
    assert ends[0] == ends[1]
    assert (ends[0] is None) is bool(news)
