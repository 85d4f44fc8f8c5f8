"""Where breakpoints stop a turn, what it has left, and what it says: what Transformers would, in any company."""

import pytest
import torch
from torch import Tensor

from app.domain.activations import CheckpointInfo, PausedTurn
from app.domain.breakpoints import MAX_PASS_EDITS, Action, Edit, EditOp, Intervention, Pass, Until, When
from app.domain.errors import FieldOutOfRange
from app.domain.values import SamplingParams, SessionId, StopRule
from app.messages import Above, Fork, PromptScored, ReadPaused, Submit, WriteCheckpoint
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import (
    Change,
    assert_close,
    boundaries,
    change_of,
    data_of,
    greedy,
    hooked,
    tensor_of,
    within,
)
from tests.gpu.driving import GREEDY

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(3, 10)
COUNT = 8


@pytest.fixture
def expected(tiny_llama: TinyModel) -> list[int]:
    return greedy(tiny_llama.oracle, START, COUNT)


def places(pauses: list[CheckpointInfo]) -> list[tuple[int, int, int]]:
    return [(pause.layer, pause.first, pause.end) for pause in pauses]


DECODED = [(position, position + 1) for position in range(10, 17)]


@pytest.mark.parametrize(
    ("when", "wanted"),
    [
        (When(Pass.PREFILL), [(0, 10)]),
        (When(Pass.DECODE), DECODED),
        (When(position=9), [(0, 10)]),
        (When(position=13), [(13, 14)]),
        (When(position=17), []),
        (When(Pass.DECODE, every=4), [(12, 13), (16, 17)]),
        (When(Pass.DECODE, position=12, every=3), [(12, 13)]),
        (When(Pass.DECODE, position=12, every=5), []),
        (When(Pass.PREFILL, position=12), []),
    ],
)
def test_it_pauses_where_all_conditions_hold(
    driver: BreakDriver, expected: list[int], when: When, wanted: list[tuple[int, int]]
) -> None:
    turn = driver.begin(driver.open_armed(1, when=when), START, COUNT)
    assert [(pause.first, pause.end) for pause in driver.run(turn)] == wanted
    assert turn.tokens == expected


def test_scored_prompts_are_scored_all_the_same(driver: BreakDriver) -> None:
    sampling = SamplingParams(seed=0, temperature=0, prompt_logprobs=1)
    scores = []
    for layers in ((), (0, 2)):
        session = driver.open()
        if layers:
            driver.arm(session, *layers)
        turn = driver.begin(session, START, 2, sampling)
        driver.run(turn)
        [scored] = [event.logprobs for event in turn.said if isinstance(event, PromptScored)]
        scores.append([(entry.token_id, entry.logprob) for entry in scored])
    assert [token for token, _ in scores[1]] == START[1:]
    assert [score for _, score in scores[1]] == pytest.approx([score for _, score in scores[0]], abs=1e-4)


def test_a_long_prompt_pauses_once_for_each_part_and_turns_go_on_from_there(tiny_gpt2: TinyModel) -> None:
    driver = BreakDriver(tiny_gpt2.engine(max_step_tokens=16))
    session, start = driver.open_armed(6), prompt(20, 40)
    first = driver.begin(session, start, 2)
    assert places(driver.run(first)) == [(6, 0, 16), (6, 16, 32), (6, 32, 40), (6, 40, 41)]
    assert first.tokens == greedy(tiny_gpt2.oracle, start, 2)
    second = driver.begin(session, [7], 3)
    pauses = driver.run(second)
    assert places(pauses) == [(6, 41, 43), (6, 43, 44), (6, 44, 45)]
    assert [pause.in_pass for pause in pauses] == [Pass.PREFILL, Pass.DECODE, Pass.DECODE]
    assert second.tokens == greedy(tiny_gpt2.oracle, [*start, *first.tokens, 7], 3)
    assert second.end.usage.cached_tokens == 41


PROMPT = prompt(4, 14)
LAYER = 1
SCALE = Edit(EditOp.SCALE, 0.5)


@pytest.fixture
def driver(tiny_llama: TinyModel) -> BreakDriver:
    """With room for one long session."""
    return BreakDriver(tiny_llama.engine(blocks=20))


def pause(driver: BreakDriver, layer: int, in_pass: Pass = Pass.ANY, steering: tuple[Edit, ...] = ()) -> Turn:
    session = driver.open()
    if steering:
        driver.arm(session, layer, action=Action.EDIT, edits=steering)
    driver.arm(session, layer, when=When(in_pass))
    return driver.turn(session, PROMPT, COUNT)


def write(driver: BreakDriver, turn: Turn, rows: Tensor) -> None:
    driver.do(WriteCheckpoint(driver.ticket(), turn.session, data_of(rows)))


def interventions(driver: BreakDriver, turn: Turn) -> tuple[Intervention, ...]:
    paused = driver.do(ReadPaused(driver.ticket(), turn.session))
    assert isinstance(paused, PausedTurn)
    return paused.interventions


@pytest.mark.parametrize("lost", [False, True])
def test_a_pass_that_leaves_out_layers_goes_on_as_if_a_hook_had_put_its_stream_there(
    driver: BreakDriver, tiny_llama: TinyModel, lost: bool
) -> None:
    """Also where the KV of the layers below has been lost, and they have to be computed after all."""
    base, child, first, last = driver.open(), SessionId("child"), 6, tiny_llama.num_layers - 1
    driver.turn(base, PROMPT, 0)
    driver.do(Fork(driver.ticket(), base, child))
    driver.arm(child, last, action=Action.CAPTURE)
    if lost:
        driver.fill()
    halved = change_of(LAYER, SCALE, within(first, len(PROMPT)))
    given = data_of(boundaries(tiny_llama.oracle, PROMPT)[LAYER + 1][first:] * SCALE.factor)
    ticket, above = driver.ticket(), Above(first, LAYER + 1, given)
    driver.take(driver.engine.handle(Submit(ticket, child, (), GREEDY, StopRule(0), above=above)))
    driver.settle(Turn(driver.events, child, [ticket]))
    rows = [row for plan in driver.plans for row in plan.rows if row.sequence.session == child]
    assert (rows[-1].first, rows[-1].path.lo, len(rows)) == ((first, 0, 2) if lost else (first, LAYER + 1, 1))
    with hooked(tiny_llama.oracle, [halved]):
        wanted = boundaries(tiny_llama.oracle, PROMPT)[last + 1]
    [record] = driver.captures(child).records
    assert_close(tensor_of(record.tensor), wanted[first:])
    # What follows sees the new KV of the layers above.
    assert driver.turn(child, [7], 3).tokens == greedy(tiny_llama.oracle, [*PROMPT, 7], 3, [halved])


@pytest.mark.parametrize(("in_pass", "edits"), [(Pass.PREFILL, ()), (Pass.PREFILL, (SCALE,)), (Pass.DECODE, ())])
def test_only_what_was_written_last_is_kept(
    driver: BreakDriver, tiny_llama: TinyModel, in_pass: Pass, edits: tuple[Edit, ...]
) -> None:
    turn = pause(driver, LAYER, in_pass, edits)
    place = turn.checkpoint
    driver.edit(turn, SCALE)
    for seed in range(5):
        rows = torch.stack([vector(10 * seed + row, 48) for row in range(place.end - place.first)])
        write(driver, turn, rows)
    assert torch.equal(driver.read(turn), rows)
    assert [(made.first, made.end) for made in interventions(driver, turn)] == [(place.first, place.end)]
    driver.fill()
    driver.run(turn, Until(end=True))
    last = iter(rows)
    steering = [change_of(LAYER, each, lambda position, _: position >= place.end) for each in edits]
    written = Change(LAYER, lambda _: next(last), within(place.first, place.end))
    assert turn.tokens == greedy(tiny_llama.oracle, PROMPT, COUNT, [written, *steering])


def test_one_pass_is_edited_so_often_and_no_more(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    """Neither by its client nor by breakpoints, of which others may be armed at every pause."""
    turn = pause(driver, LAYER, Pass.PREFILL)
    same, zero = Edit(EditOp.SCALE, 1.0), Edit(EditOp.ABLATE)
    driver.edit(turn, *[same] * (MAX_PASS_EDITS - 1))
    before, made = driver.read(turn), interventions(driver, turn)
    with pytest.raises(FieldOutOfRange, match=f"from 0 to {MAX_PASS_EDITS}") as caught:
        driver.edit(turn, zero, zero)
    assert (caught.value.status, caught.value.param) == (422, "edits")
    assert torch.equal(driver.read(turn), before)
    assert interventions(driver, turn) == made
    child = driver.fork(turn)
    driver.edit(turn, same)
    driver.run(turn)
    assert turn.tokens == greedy(tiny_llama.oracle, PROMPT, COUNT)
    driver.arm(child.session, LAYER + 1, action=Action.EDIT, edits=(same, same))
    with pytest.raises(FieldOutOfRange, match=f"{MAX_PASS_EDITS + 1} edits.*from 0 to {MAX_PASS_EDITS}") as caught:
        driver.run(child)
    assert caught.value.param == "breakpoints"
