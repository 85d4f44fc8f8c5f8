"""Sessions that are steered or paused, and the work of it in a step. No other session shares their edited KV.

Their edits survive a recompute, a move between tiers, a fork, an export and a restart.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.domain.breakpoints import ALL, MAX_WORK, STEP_WORK, Action, Edit, EditOp, Intervention, Pass, Positions, When
from app.domain.values import KVPolicy, Phase, SessionId, Ticket
from app.gpu.planning.queue import StepPlan
from app.gpu.state.paths import Record, work_of
from app.messages import Export, ExportedKV, Import, Open, Reinstate
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import change_of, data_of, everywhere, greedy, within

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(12, 5 * BLOCK + 2)
SHARED = 5 * BLOCK
COUNT = 9
LAYER = 1
ADD = Edit(EditOp.ADD, 2.0, data_of(2 * vector(3, 48)))
SCALE = Edit(EditOp.SCALE, 0.5)


def with_edits(model: TinyModel, history: list[int], place: tuple[int, int], *edits: Edit) -> list[int]:
    """What Transformers says after `history` with these edits at these positions."""
    return greedy(model.oracle, history, COUNT, [change_of(LAYER, edit, within(*place)) for edit in edits])


@pytest.mark.parametrize("first_is_steered", [True, False])
@pytest.mark.parametrize("positions", [ALL, Positions(2 * BLOCK, 2 * BLOCK + 1), Positions(4 * BLOCK)])
def test_steered_and_unsteered_sessions_share_what_is_the_same_and_nothing_else(
    driver: BreakDriver, tiny_llama: TinyModel, positions: Positions, first_is_steered: bool
) -> None:
    edit = replace(ADD, positions=positions)
    end = len(START) + COUNT if positions.end is None else positions.end
    found = []
    for is_steered in (first_is_steered, not first_is_steered):
        edits = (edit,) if is_steered else ()
        session = driver.open_armed(LAYER, action=Action.EDIT, edits=edits) if is_steered else driver.open()
        turn = driver.turn(session, START, COUNT)
        assert turn.tokens == with_edits(tiny_llama, START, (positions.first, end), *edits)
        found.append(turn.end.usage.cached_tokens)
    assert found == [0, positions.first]


def test_the_same_steering_shares_and_other_steering_does_not(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    others = (replace(ADD, factor=1.5), replace(ADD, vector=data_of(2 * vector(4, 48))), replace(ADD, max_norm=3.0))
    lists = [(ADD,), (ADD,), *((each,) for each in others), (ADD, SCALE), (SCALE, ADD), (SCALE, ADD)]
    cached = []
    for layer, edits in [*((LAYER, each) for each in lists), (0, (ADD,)), (2, (ADD,))]:
        turn = driver.turn(driver.open_armed(layer, action=Action.EDIT, edits=edits), START, COUNT)
        assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, [change_of(layer, edit) for edit in edits])
        cached.append(turn.end.usage.cached_tokens)
    assert cached == [0, SHARED, 0, 0, 0, 0, 0, SHARED, 0, 0]


def test_an_edit_made_at_a_pause_is_not_shared(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    session = driver.open_armed(LAYER, when=When(Pass.PREFILL))
    turn = driver.turn(session, START, COUNT)
    driver.edit(turn, replace(ADD, positions=Positions(2 * BLOCK)))
    driver.run(turn)
    assert turn.tokens == with_edits(tiny_llama, START, (2 * BLOCK, len(START)), ADD)
    plain = driver.turn(driver.open(), START, COUNT)
    assert plain.tokens == greedy(tiny_llama.oracle, START, COUNT)
    assert plain.end.usage.cached_tokens == 2 * BLOCK


def test_what_comes_after_the_steering_is_not_shared_either(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    """Later blocks have attended to steered ones, though nothing was done to them."""
    session = driver.open_armed(LAYER, action=Action.EDIT, edits=(ADD,), when=When(position=0))
    history = START + driver.turn(session, START, COUNT).tokens
    again = driver.turn(driver.open(), [*history, 5], COUNT)
    assert again.end.usage.cached_tokens == 0
    assert again.tokens == greedy(tiny_llama.oracle, [*history, 5], COUNT)


FOUND = 3 * BLOCK
"""Positions that a session finds in the cache: it pauses just after them, and then loses them."""
STEERING = Edit(EditOp.ADD, 0.5, data_of(2 * vector(5, 48)))
AT_PAUSE = Edit(EditOp.ADD, 30.0, data_of(2 * vector(4, 48)))
PROMPT = prompt(16, 5 * BLOCK + 1)


def pause_after_prefix(driver: BreakDriver, *, steered: bool) -> Turn:
    """The turn of a session that finds what another one has left in the cache."""
    first, session = driver.open(), driver.open()
    for each in (first, session) if steered else ():
        driver.arm(each, 0, action=Action.EDIT, edits=(STEERING,))
    driver.turn(first, PROMPT, 1)
    driver.close(first)
    driver.arm(session, LAYER, when=When(Pass.PREFILL, position=FOUND + 1))
    turn = driver.turn(session, PROMPT, COUNT)
    assert (turn.checkpoint.first, turn.checkpoint.end) == (FOUND, len(PROMPT))
    return turn


@pytest.mark.parametrize("goes", ["to disk", "to disk, and is forked there", "nowhere, and is lost"])
def test_a_breakpoint_armed_during_the_pause_is_not_met_in_what_was_found(
    tiny_llama: TinyModel, tmp_path: Path, goes: str
) -> None:
    """A fork of a session on disk has nothing but the history."""
    lost = goes == "nowhere, and is lost"
    tiers: dict[str, Any] = {"host_blocks": 200, "policy": KVPolicy.SIGNAL, "kv_dir": tmp_path}
    driver = BreakDriver(tiny_llama.engine(**({"blocks": 20} if lost else tiers)))
    turn = pause_after_prefix(driver, steered=False)
    driver.edit(turn, AT_PAUSE)
    if lost:
        driver.fill()
    else:
        driver.signal(turn.session, Phase.IDLE)
        driver.advance()
    going_on = driver.fork(turn) if "forked" in goes else turn
    driver.arm(going_on.session, 0, when=When(Pass.PREFILL, position=2), once=True)
    assert [pause.first for pause in driver.run(going_on)] == [FOUND]
    change = change_of(LAYER, AT_PAUSE, within(FOUND, len(PROMPT)))
    assert going_on.tokens == greedy(tiny_llama.oracle, PROMPT, COUNT, [change])
    assert going_on.end.usage.cached_tokens == FOUND
    assert (going_on.end.usage.tokens_recomputed > 0) is lost


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
    path, imported = str(tmp_path / "session.kv"), SessionId("imported")
    exported = driver.do(Export(driver.ticket(), session, path, "{}"))
    assert isinstance(exported, ExportedKV)
    driver.do(Import(driver.ticket(), imported, path, ""))
    assert (exported.computed_tokens > 0) is (host_blocks == 200)
    made = turn.end.interventions
    assert made
    driver.do(Reinstate(driver.ticket(), imported, () if disarmed else (armed,), made))
    history = START + turn.tokens
    where = within(0, len(history) - 1) if disarmed else everywhere
    wanted = greedy(tiny_llama.oracle, [*history, 5, 6, 7], COUNT, [change_of(LAYER, ADD, where)])
    for each in (session, imported):
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
