"""Sessions that pause and are parked, forked, cancelled, closed or imported, or lose their KV: only edits count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.domain.activations import PausedTurn
from app.domain.breakpoints import Action, Edit, EditOp, Pass, When
from app.domain.errors import WrongState
from app.domain.values import FinishReason, KVPolicy, Phase, SessionId, Ticket
from app.messages import Export, ExportedKV, Fork, Import, Open, ReadPaused, Reinstate
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import change_of, data_of, everywhere, greedy, tensor_of, within

pytestmark = pytest.mark.usefixtures("one_thread")


START = prompt(16, 5 * BLOCK + 1)
COUNT = 9
LAYER = 1
ADD = Edit(EditOp.ADD, 2.0, data_of(2 * vector(3, 48)))
EDITS = (
    Edit(EditOp.SCALE, 0.3),
    ADD,
    Edit(EditOp.ADD, -2.0, data_of(2 * vector(1, 48))),
    Edit(EditOp.REPLACE, 1.0, data_of(2 * vector(2, 48))),
    Edit(EditOp.PROJECT_OUT, 1.0, data_of(vector(3, 48))),
    Edit(EditOp.CLAMP, 9.0, data_of(vector(4, 48))),
    Edit(EditOp.ABLATE),
)
in_both_passes = pytest.mark.parametrize("in_pass", [Pass.PREFILL, Pass.DECODE])
in_both_tiers = pytest.mark.parametrize("parked", [False, True], ids=["on-device", "parked"])


@pytest.fixture
def tiered(tiny_llama: TinyModel, tmp_path: Path) -> BreakDriver:
    return BreakDriver(tiny_llama.engine(host_blocks=200, policy=KVPolicy.SIGNAL, kv_dir=tmp_path))


@pytest.fixture
def dropping(tiny_llama: TinyModel) -> BreakDriver:
    """Without lower tiers, and with room for one long session."""
    return BreakDriver(tiny_llama.engine(blocks=20))


@pytest.fixture
def expected(tiny_llama: TinyModel) -> list[int]:
    return greedy(tiny_llama.oracle, START, COUNT)


def pause(driver: BreakDriver, in_pass: Pass) -> Turn:
    """A turn that is paused at its prompt, or after four tokens."""
    turn = driver.turn(driver.open_armed(LAYER, when=When(in_pass)), START, COUNT)
    if in_pass is Pass.DECODE:
        for _ in range(3):
            driver.go_on(turn)
    assert turn.paused
    return turn


def with_edits(model: TinyModel, places: list[tuple[int, int]], *edits: Edit) -> list[int]:
    """What Transformers says with these edits at these positions."""
    return greedy(model.oracle, START, COUNT, [change_of(LAYER, e, within(*place)) for place in places for e in edits])


@in_both_passes
@pytest.mark.parametrize("phase", [Phase.IO_WAIT, Phase.IDLE])
def test_a_paused_session_is_parked_and_comes_back(
    tiered: BreakDriver, expected: list[int], in_pass: Pass, phase: Phase
) -> None:
    turn = pause(tiered, in_pass)
    activation = tiered.read(turn)
    tiered.signal(turn.session, phase)
    assert tiered.owned == 0
    assert tiered.read(turn).equal(activation)
    tiered.fill(100)
    tiered.run(turn)
    assert turn.tokens == expected
    assert turn.end.usage.tokens_recomputed == 0


def test_what_a_pass_has_not_run_yet_does_not_move_and_nobody_reads_it(
    tiered: BreakDriver, expected: list[int]
) -> None:
    turn = pause(tiered, Pass.PREFILL)
    layers, pool = tiered.engine.info.num_layers, tiered.runner.pool.data
    whole = tiered.place(turn.session)
    for _ in range(2):
        tiered.signal(turn.session, Phase.IO_WAIT)
        pool.fill_(1e4)
        tiered.signal(turn.session, Phase.READY)
    place = tiered.place(turn.session)
    assert place.bytes_in == 2 * place.bytes_out == 2 * whole.device_bytes * (LAYER + 1) // layers
    tiered.run(turn)
    assert turn.tokens == expected


@in_both_passes
def test_a_paused_session_that_loses_its_kv_recomputes_it_with_the_edits_made(
    dropping: BreakDriver, tiny_llama: TinyModel, in_pass: Pass
) -> None:
    turn, places = pause(dropping, in_pass), list[tuple[int, int]]()
    for _ in range(2):
        if turn.paused:
            places.append((turn.checkpoint.first, turn.checkpoint.end))
            dropping.edit(turn, ADD)
            dropping.fill()
            assert dropping.place(turn.session).device_bytes == 0
            dropping.go_on(turn)
    dropping.run(turn)
    assert turn.tokens == with_edits(tiny_llama, places, ADD)
    assert turn.end.usage.completion_tokens == COUNT


@in_both_tiers
@pytest.mark.parametrize(("in_pass", "keep"), [(Pass.PREFILL, None), (Pass.DECODE, None), (Pass.DECODE, 2)])
def test_cancel_ends_a_paused_turn_and_the_session_goes_on(
    tiered: BreakDriver, tiny_llama: TinyModel, expected: list[int], in_pass: Pass, keep: int | None, parked: bool
) -> None:
    turn = pause(tiered, in_pass)
    generated = 0 if in_pass is Pass.PREFILL else keep or 4
    if parked:
        tiered.signal(turn.session, Phase.IO_WAIT)
    assert tiered.cancel(turn, keep) == len(START) + generated
    assert turn.end.reason is FinishReason.CANCELLED
    assert turn.end.usage.completion_tokens == generated
    again = tiered.begin(turn.session, [5], 4)
    tiered.run(again)
    assert again.tokens == greedy(tiny_llama.oracle, [*START, *expected[:generated], 5], 4)


@in_both_tiers
def test_close_frees_all_that_a_paused_session_held(tiered: BreakDriver, parked: bool) -> None:
    turn = pause(tiered, Pass.DECODE)
    child = tiered.fork(turn)
    if parked:
        tiered.signal(turn.session, Phase.IO_WAIT)
    tiered.close(turn.session)
    assert turn.end.reason is FinishReason.CANCELLED
    tiered.close(child.session)
    tiered.move()
    memory = tiered.memory()
    assert (memory.kv_owned_bytes, memory.host.owned_bytes, memory.disk.owned_bytes) == (0, 0, 0)
    assert memory.running == memory.waiting == memory.sessions == 0


@pytest.fixture
def driver(tiny_llama: TinyModel) -> BreakDriver:
    return BreakDriver(tiny_llama.engine())


def pause_once(driver: BreakDriver, position: int) -> Turn:
    """A turn that is paused in the pass with this position, and has no breakpoints left."""
    turn = driver.turn(driver.open_armed(LAYER, when=When(position=position), once=True), START, COUNT)
    assert turn.paused
    return turn


@pytest.mark.parametrize("position", [0, len(START) + 3], ids=["prefill", "decode"])
def test_forks_of_one_pause_share_what_they_have_and_go_their_own_ways(
    driver: BreakDriver, tiny_llama: TinyModel, position: int
) -> None:
    turn = pause_once(driver, position)
    place, before = (turn.checkpoint.first, turn.checkpoint.end), driver.owned
    children, unedited = [driver.fork(turn) for _ in EDITS], driver.fork(turn)
    assert driver.owned == before
    for child, edit in zip(children, EDITS, strict=True):
        driver.edit(child, edit)
    turns = [turn, unedited, *children]
    for each in turns:
        driver.resume(each)
    driver.settle(*turns)

    assert turn.tokens == unedited.tokens == with_edits(tiny_llama, [place])
    for child, edit in zip(children, EDITS, strict=True):
        assert child.tokens == with_edits(tiny_llama, [place], edit)
    assert len({tuple(child.tokens) for child in children}) > 2

    shared = place[0] // BLOCK
    each_has = -(-(len(START) + COUNT - 1) // BLOCK)
    assert driver.owned == shared + len(turns) * (each_has - shared)
    for each in turns:
        driver.close(each.session)
    assert driver.owned == 0


def test_a_child_is_paused_in_the_same_place_with_the_same_breakpoints(
    driver: BreakDriver, tiny_llama: TinyModel
) -> None:
    session, double = driver.open_armed(1, when=When(Pass.DECODE)), Edit(EditOp.SCALE, 2.0)
    driver.arm(session, 3, action=Action.EDIT, edits=(double,))
    turn = driver.turn(session, START, COUNT)
    child = driver.fork(turn)
    assert torch.equal(driver.read(child), driver.read(turn))
    driver.disarm(session)  # the edit of layer 3 too, which the paused pass has not reached
    pauses = driver.run(child)
    assert [pause.first for pause in pauses] == list(range(len(START), len(START) + COUNT - 1))
    assert child.tokens == greedy(tiny_llama.oracle, START, COUNT, [change_of(3, double)])
    assert child.end.usage.completion_tokens == COUNT
    assert len(driver.run(turn)) == 1
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, [change_of(3, double, within(0, len(START)))])


def test_a_ticket_that_does_not_fit_the_state_is_refused(driver: BreakDriver, expected: list[int]) -> None:
    turn = pause_once(driver, 0)
    with pytest.raises(WrongState):
        driver.fork_idle(turn.session)
    driver.run(turn)
    assert turn.tokens == expected
    before = driver.owned
    with pytest.raises(WrongState):
        driver.do(Fork(driver.ticket(), turn.session, driver.open(), Ticket(10_000)))
    assert driver.owned == before


IMPORTED = SessionId("imported")


def copy_by_file(driver: BreakDriver, session: SessionId, folder: Path) -> ExportedKV:
    """Export the session and import the file."""
    path = str(folder / "session.kv")
    exported = driver.do(Export(driver.ticket(), session, path, "{}"))
    assert isinstance(exported, ExportedKV)
    driver.do(Import(driver.ticket(), IMPORTED, path, ""))
    return exported


@pytest.mark.parametrize(("first", "parked"), [(0, False), (3, True), (2 * BLOCK, False)])
def test_a_checkpoint_below_the_imported_kv_goes_on_and_harms_nobody(
    tiny_llama: TinyModel, tmp_path: Path, first: int, parked: bool
) -> None:
    """The file of one session with the label of another: both of them are valid."""
    tiers: dict[str, Any] = {} if parked else {"host_blocks": 200, "policy": KVPolicy.SIGNAL, "kv_dir": tmp_path / "kv"}
    driver = BreakDriver(tiny_llama.engine(**tiers))
    whole = driver.open()
    driver.turn(whole, START, 1)
    other = driver.open_armed(LAYER, when=When(Pass.PREFILL, position=0))
    turn = driver.turn(other, START, COUNT)
    paused = driver.do(ReadPaused(driver.ticket(), other))
    assert isinstance(paused, PausedTurn)
    info = replace(paused.checkpoint, first=first, end=first + 5)
    exported = copy_by_file(driver, whole, tmp_path)
    assert exported.computed_tokens == (0 if parked else len(START))
    forged = replace(paused, checkpoint=info, hidden=data_of(tensor_of(paused.hidden)[first : first + 5]))
    imported = Turn(driver.events, IMPORTED, [driver.ticket()])
    driver.do(Reinstate(driver.ticket(), IMPORTED, paused=forged, turn=imported.tickets[0]))
    bystander = driver.begin(driver.open(), prompt(8, 10), 30)
    driver.advance()
    driver.advance()
    driver.go_on(imported)
    driver.settle(bystander)
    assert bystander.tokens == greedy(tiny_llama.oracle, prompt(8, 10), 30)
    assert imported.tokens == greedy(tiny_llama.oracle, START, COUNT)[1:]
    driver.run(turn)
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT)


@pytest.mark.parametrize(("host_blocks", "disarmed"), [(200, False), (200, True), (2, True), (0, False), (0, True)])
def test_an_import_keeps_its_steering_whatever_of_its_kv_came_along(
    tiny_llama: TinyModel, tmp_path: Path, host_blocks: int, disarmed: bool
) -> None:
    policy = KVPolicy.SIGNAL if host_blocks else KVPolicy.NONE
    driver = BreakDriver(tiny_llama.engine(host_blocks=host_blocks, policy=policy, kv_dir=tmp_path / "kv"))
    session = driver.open()
    armed = driver.arm(session, LAYER, action=Action.EDIT, edits=(ADD,))
    turn = driver.turn(session, START, 4)
    if disarmed:
        driver.disarm(session, armed)
    exported = copy_by_file(driver, session, tmp_path)
    assert (exported.computed_tokens > 0) is (host_blocks == 200)
    made = turn.end.interventions
    assert made
    driver.do(Reinstate(driver.ticket(), IMPORTED, () if disarmed else (armed,), made))
    history = START + turn.tokens
    where = within(0, len(history) - 1) if disarmed else everywhere
    wanted = greedy(tiny_llama.oracle, [*history, 5, 6, 7], COUNT, [change_of(LAYER, ADD, where)])
    for each in (session, IMPORTED):
        again = driver.turn(each, [5, 6, 7], COUNT)
        assert again.tokens == wanted


@pytest.mark.parametrize("news", [[], [7]])
def test_a_turn_that_generated_nothing_is_steered_to_its_end_after_a_restart(
    driver: BreakDriver, tiny_llama: TinyModel, news: list[int]
) -> None:
    """Nobody has computed the last token of most histories; here somebody has."""
    session = driver.open()
    armed = driver.arm(session, LAYER, action=Action.EDIT, edits=(ADD,))
    before = driver.turn(session, START, 0)
    made = before.end.interventions
    assert made
    restarted, again = BreakDriver(tiny_llama.engine()), SessionId("again")
    opened = Open(Ticket(10**6), again, token_ids=tuple(START), breakpoints=(armed,), interventions=made)
    restarted.do(opened)
    ends = []
    for each, name in ((driver, session), (restarted, again)):
        each.disarm(name, armed)
        turn = each.turn(name, news, COUNT)
        steered = min(len(START), len(START) + len(news) - 1)  # the last of a context is computed anew
        change = change_of(LAYER, ADD, within(0, steered))
        assert turn.tokens == greedy(tiny_llama.oracle, START + news, COUNT, [change])
        ends.append(turn.end.interventions)
    assert ends[0] == ends[1]
    assert (ends[0] is None) is bool(news)
