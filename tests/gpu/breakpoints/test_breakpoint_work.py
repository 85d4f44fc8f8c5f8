"""What the breakpoints of one session may do in a step that all sessions wait for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.domain.breakpoint_work import MAX_WORK, STEP_WORK
from app.domain.breakpoints import Action, Edit, EditOp, Intervention, Pass, TensorData, When
from app.domain.values import KVPolicy, Phase, SessionId
from app.gpu.passes.pass_plan import PassPlan, Record
from app.gpu.passes.work import work_of_way
from app.gpu.planning.step_plan import StepPlan
from app.gpu.step import watch
from app.gpu.step.edits import apply_edit
from app.messages import Open
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import change_of, data_of, greedy, tensor_of

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = (0, 1, 2, 3)
LONG = prompt(21, 97)
SHORT = prompt(22, 5)
ADDS = tuple(Edit(EditOp.ADD, 0.01 * number, data_of(vector(number, 48))) for number in range(1, 17))
SAME = tuple(Edit(EditOp.SCALE, 1.0) for _ in range(16))


def operations(plan: StepPlan) -> int:
    """Edits and captures that the step makes, whatever number of positions they are for."""
    return sum(operations_of(row.way) for row in plan.rows)


def operations_of(way: PassPlan) -> int:
    return sum(isinstance(step, Intervention | Record) for mark in way.marks for step in mark.steps)


def assert_bounded(driver: BreakDriver) -> None:
    """No step has more than it may, or it has one row with work."""
    for plan in driver.plans:
        works = [work_of_way(row.way) for row in plan.rows if row.way.marks]
        assert sum(works) <= STEP_WORK or len(works) == 1
        assert operations(plan) <= MAX_WORK


def in_steps(driver: BreakDriver, turn: Turn) -> list[int]:
    """The steps that have a row of the turn's session."""
    return [
        number
        for number, plan in enumerate(driver.plans)
        if any(row.sequence.session == turn.session for row in plan.rows)
    ]


def arm_all(driver: BreakDriver, session: SessionId, when: When = When()) -> None:  # noqa: B008 (frozen)
    """All that a session may do, and none of it changes a token."""
    for _ in range(MAX_WORK // (len(LAYERS) * len(SAME))):
        driver.arm(session, *LAYERS, action=Action.EDIT, edits=SAME, when=when)


def test_edits_after_every_other_position_are_few_operations(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied, digested = list[Edit](), list[Edit]()
    make_digest = Edit._make_digest

    def apply(hidden: Tensor, edit: Edit, place: Callable[[TensorData], Tensor]) -> None:
        applied.append(edit)
        apply_edit(hidden, edit, place)

    def digest(edit: Edit) -> bytes:
        digested.append(edit)
        return make_digest(edit)

    monkeypatch.setattr(watch, "apply_edit", apply)
    monkeypatch.setattr(Edit, "_make_digest", digest)
    driver = BreakDriver(tiny_llama.engine(max_step_tokens=128))
    session = driver.open()
    edits = tuple(Edit(each.op, each.factor, each.vector) for each in ADDS)  # digested nowhere else
    driver.arm(session, *LAYERS, action=Action.EDIT, edits=edits, when=When(Pass.PREFILL, every=2))
    turn, other = driver.begin(session, LONG, 1), driver.begin(driver.open(), SHORT, 4)
    driver.settle(turn, other)
    assert max(map(operations, driver.plans)) == len(LAYERS) * len(edits)
    assert len(applied) == len(LAYERS) * len(edits)
    assert len(digested) == len(edits)
    changes = [change_of(layer, edit, lambda at, _: at % 2 == 0) for layer in LAYERS for edit in edits]
    assert turn.tokens == greedy(tiny_llama.oracle, LONG, 1, changes)
    assert other.tokens == greedy(tiny_llama.oracle, SHORT, 4)


@pytest.mark.parametrize("when", [When(), When(every=2)], ids=["all", "every other"])
def test_sessions_that_want_more_than_a_step_take_turns_and_others_have_every_step(
    tiny_llama: TinyModel, when: When
) -> None:
    driver, count = BreakDriver(tiny_llama.engine(max_step_tokens=128)), 8
    plain = driver.begin(driver.open(), SHORT, 60)
    sessions = [driver.open() for _ in range(2)]
    for session in sessions:
        arm_all(driver, session, when)
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


@pytest.mark.parametrize(("pauses", "part"), [(False, 16), (True, 64)])
def test_a_prompt_that_only_captures_has_the_parts_of_a_crowded_step(
    tiny_llama: TinyModel, pauses: bool, part: int
) -> None:
    """Whether others have turns or not. One that may pause has whole steps."""
    engine = tiny_llama.engine(max_step_tokens=64)
    engine._scheduler.shared.prompt_tokens = 32
    driver = BreakDriver(engine)
    session = driver.open()
    driver.arm(session, 1, action=Action.CAPTURE)
    if pauses:
        driver.arm(session, 3, when=When(token_id=500))  # never
    turn = driver.begin(session, LONG, 3)
    driver.settle(turn)
    assert max(row.length for plan in driver.plans for row in plan.rows) == part
    assert len(driver.captures(session).records[0].positions) == part
    assert turn.tokens == greedy(tiny_llama.oracle, LONG, 3)


@pytest.mark.parametrize("every", [1, 2])
def test_a_prompt_that_wants_more_than_a_step_comes_in_shorter_parts(tiny_llama: TinyModel, every: int) -> None:
    driver = BreakDriver(tiny_llama.engine(max_step_tokens=128))
    session = driver.open()
    arm_all(driver, session, When(every=every))
    driver.arm(session, LAYERS[-1])  # it pauses when all edits are made
    turn = driver.begin(session, LONG, 3)
    parts = [(place.first, place.end) for place in driver.run(turn)]
    assert_bounded(driver)
    assert parts[0] == (0, min(len(LONG), STEP_WORK // MAX_WORK * every))
    assert [first for first, _ in parts[1:]] == [end for _, end in parts[:-1]]
    assert turn.tokens == greedy(tiny_llama.oracle, LONG, 3)


def test_kv_that_was_lost_is_computed_again_within_the_same_bounds(tiny_llama: TinyModel) -> None:
    driver = BreakDriver(tiny_llama.engine(blocks=32, max_step_tokens=128))
    session = driver.open()
    for edits in (ADDS, SAME, SAME, SAME):
        driver.arm(session, *LAYERS, action=Action.EDIT, edits=edits, when=When(Pass.PREFILL))
    first = driver.begin(session, LONG, 2)
    driver.settle(first)
    driver.settle(driver.begin(driver.open(), prompt(23, 120), 2))  # takes the whole device
    again = driver.begin(session, [9], 2)
    driver.settle(again)
    assert_bounded(driver)
    assert again.end.usage.tokens_recomputed > STEP_WORK // MAX_WORK
    changes = [change_of(layer, edit, lambda at, _: at < len(LONG)) for layer in LAYERS for edit in ADDS]
    history = [*LONG, *first.tokens, 9]
    changes += [
        change_of(layer, edit, lambda at, _: len(LONG) < at < len(history)) for layer in LAYERS for edit in ADDS
    ]
    assert first.tokens == greedy(tiny_llama.oracle, LONG, 2, changes[: len(changes) // 2])
    assert again.tokens == greedy(tiny_llama.oracle, history, 2, changes)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    every=st.integers(1, 9),
    layer=st.sampled_from(LAYERS),
    op=st.sampled_from(EditOp),
    length=st.integers(2, 60),
    part=st.sampled_from([7, 16, 64]),
)
def test_an_edit_at_every_so_many_positions_is_what_transformers_makes_one_by_one(
    tiny_llama: TinyModel, every: int, layer: int, op: EditOp, length: int, part: int
) -> None:
    needs = op not in (EditOp.SCALE, EditOp.ABLATE)
    edit = Edit(op, 0.7, data_of(vector(31, 48)) if needs else None)
    driver = BreakDriver(tiny_llama.engine(max_step_tokens=part))
    session = driver.open()
    driver.arm(session, layer, action=Action.EDIT, edits=(edit,), when=When(every=every))
    turn = driver.begin(session, LONG[:length], 5)
    driver.settle(turn)
    change = change_of(layer, edit, lambda at, _: at % every == 0)
    assert turn.tokens == greedy(tiny_llama.oracle, LONG[:length], 5, [change])
    if length >= every:
        assert sum(map(operations, driver.plans)) > 0


@pytest.mark.parametrize("op", [EditOp.ADD, EditOp.CLAMP, EditOp.PROJECT_OUT])
def test_parts_of_any_length_have_the_same_bits(invariant_llama: TinyModel, op: EditOp) -> None:
    found = list[tuple[list[int], list[Tensor]]]()
    edit = Edit(op, 0.7, data_of(vector(31, 48)))
    for part in (5, 32, 128):
        driver = BreakDriver(invariant_llama.engine(max_step_tokens=part))
        session = driver.open()
        driver.arm(session, 1, action=Action.EDIT, edits=(edit,), when=When(every=3))
        driver.arm(session, 3, action=Action.CAPTURE, when=When(every=2))
        turn = driver.begin(session, LONG, 6)
        driver.settle(turn)
        records = driver.captures(session).records
        by_position = {
            position: row
            for each in records
            for position, row in zip(each.positions, tensor_of(each.tensor), strict=True)
        }
        found.append((turn.tokens, [by_position[position] for position in sorted(by_position)]))
    for tokens, rows in found[1:]:
        assert tokens == found[0][0]
        assert torch.equal(torch.stack(rows), torch.stack(found[0][1]))


def test_a_fork_and_a_session_that_comes_back_from_the_host_go_on_with_the_same_runs(tiny_llama: TinyModel) -> None:
    driver = BreakDriver(tiny_llama.engine(blocks=80, host_blocks=80, policy=KVPolicy.SIGNAL))
    session, edit = driver.open(), ADDS[9]
    driver.arm(session, 1, action=Action.EDIT, edits=(edit,), when=When(every=3))
    first = driver.begin(session, LONG[:40], 4)
    driver.settle(first)
    driver.signal(session, Phase.IO_WAIT)
    child = driver.fork_idle(session)
    history = [*LONG[:40], *first.tokens, 9]
    wanted = greedy(tiny_llama.oracle, history, 4, [change_of(1, edit, lambda at, _: at % 3 == 0)])
    for each in (session, child):
        turn = driver.begin(each, [9], 4)
        driver.settle(turn)
        assert turn.tokens == wanted
    for sequence in driver.engine._handler.sequences:
        [made] = sequence.interventions.snapshot()
        assert len(made.runs) == 1


def test_equal_edits_are_an_entry_each_and_lead_to_the_same_tokens_again(tiny_llama: TinyModel) -> None:
    """Also when the KV is lost, and when another engine has it: then all of the history meets them once more."""
    driver = BreakDriver(tiny_llama.engine(max_step_tokens=16))
    session = driver.open()
    add = Edit(EditOp.ADD, 0.02, data_of(vector(3, 48)))
    armed = driver.arm(session, *LAYERS, action=Action.EDIT, edits=(add,) * 16)
    turn = driver.begin(session, LONG, 8)
    driver.settle(turn)
    made = turn.end.interventions or ()
    assert len(made) == len(LAYERS) * 16
    assert {(each.first, each.end, each.only) for each in made} == {(0, len(LONG) + 7, ())}
    [sequence] = driver.engine._handler.sequences
    history, went_on = tuple(sequence.tokens), driver.begin(session, SHORT, 4)
    driver.settle(went_on)

    other = BreakDriver(tiny_llama.engine(max_step_tokens=16))
    opened, fresh = SessionId("opened"), other.open()
    other.do(Open(other.ticket(), opened, token_ids=history, breakpoints=(armed,), interventions=made))
    other.arm(fresh, *LAYERS, action=Action.EDIT, edits=(add,) * 16)
    again = other.begin(opened, SHORT, 4)
    other.settle(again)
    assert again.tokens == went_on.tokens
    assert again.end.interventions == went_on.end.interventions
    shared = other.begin(fresh, (*history, *SHORT), 4)
    other.settle(shared)
    assert shared.tokens == went_on.tokens
    assert shared.end.usage.cached_tokens >= len(LONG)
    assert shared.end.interventions == went_on.end.interventions
