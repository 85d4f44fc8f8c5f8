"""Where breakpoints stop a turn, how far it is resumed, and what it says: what Transformers would, in any company."""

from __future__ import annotations

import random

import pytest

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import Action, Pass, Until, When
from app.domain.errors import FieldOutOfRange, NotFound, WrongState
from app.domain.values import FinishReason, SamplingParams, SessionId, StopRule
from app.messages import Disarm, PromptScored, Rewind
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import greedy
from tests.gpu.oracle import greedy_after

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(3, 10)
COUNT = 8


@pytest.fixture
def driver(tiny_llama: TinyModel) -> BreakDriver:
    return BreakDriver(tiny_llama.engine())


@pytest.fixture
def expected(tiny_llama: TinyModel) -> list[int]:
    return greedy(tiny_llama.oracle, START, COUNT)


def paused_turn(driver: BreakDriver, *layers: int, when: When | None = None) -> Turn:
    session = driver.open_armed(*layers, when=when or When())
    turn = driver.turn(session, START, COUNT)
    assert turn.paused
    return turn


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


def test_it_pauses_at_a_token(driver: BreakDriver, expected: list[int]) -> None:
    token = expected[2]
    turn = driver.begin(driver.open_armed(1, when=When(Pass.DECODE, token_id=token)), START, COUNT)
    wanted = [place for place, found in zip(DECODED, expected, strict=False) if found == token]
    assert [(pause.first, pause.end) for pause in driver.run(turn)] == wanted
    assert turn.tokens == expected


def test_once_it_is_gone_and_says_so(driver: BreakDriver, expected: list[int]) -> None:
    session = driver.open()
    made = driver.arm(session, 1, 2, when=When(Pass.DECODE), once=True)
    turn = driver.begin(session, START, COUNT)
    assert places(driver.run(turn)) == [(1, 10, 11)]
    assert [(spent.session, spent.breakpoint) for spent in driver.spent] == [(session, made.id)]
    assert turn.tokens == expected


def test_the_pause_says_where_it_is(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    turn = paused_turn(driver, 2)
    found, size = turn.checkpoint, tiny_llama.hidden_size
    assert (found.layer, found.first, found.end, found.in_pass) == (2, 0, 10, Pass.PREFILL)
    assert (found.hidden_size, found.dtype, found.bytes) == (size, "float32", 10 * size * 4)
    assert found.breakpoint is not None
    assert 0 <= found.saved_ms < 1000
    driver.go_on(turn, Until(layer=3))
    assert turn.checkpoint.breakpoint is None


def test_until_a_layer_steps_through_the_pass(driver: BreakDriver, expected: list[int]) -> None:
    turn = paused_turn(driver, 0, when=When(Pass.DECODE))
    for layer in (1, 2, 3):
        driver.go_on(turn, Until(layer=layer))
        assert places([turn.checkpoint]) == [(layer, 10, 11)]
    driver.go_on(turn)
    assert places([turn.checkpoint]) == [(0, 11, 12)]
    assert driver.run(turn, Until(end=True))
    assert turn.tokens == expected


def test_until_a_layer_stops_at_a_breakpoint_before_it(driver: BreakDriver) -> None:
    turn = paused_turn(driver, 0, 1)
    driver.go_on(turn, Until(layer=3))
    assert places([turn.checkpoint]) == [(1, 0, 10)]


def test_until_the_next_token_stops_at_the_same_layer_of_its_pass(driver: BreakDriver, expected: list[int]) -> None:
    turn = paused_turn(driver, 2, when=When(Pass.PREFILL))
    for position in (10, 11):
        driver.go_on(turn, Until(next_token=True))
        assert places([turn.checkpoint]) == [(2, position, position + 1)]
        assert turn.tokens == expected[: position - 9]
    driver.go_on(turn)
    assert turn.tokens == expected
    assert turn.end.reason is FinishReason.LENGTH


def test_until_the_end_passes_breakpoints_in_this_turn_only(driver: BreakDriver, expected: list[int]) -> None:
    turn = paused_turn(driver, 1)
    assert places(driver.run(turn, Until(end=True))) == [(1, 0, 10)]
    assert turn.tokens == expected
    again = driver.turn(turn.session, [5], 2)
    assert again.paused


@pytest.mark.parametrize("layer", [0, 1, 4, -1])
def test_a_layer_that_is_not_ahead_is_refused(driver: BreakDriver, layer: int, expected: list[int]) -> None:
    turn = paused_turn(driver, 1)
    with pytest.raises(FieldOutOfRange) as caught:
        driver.resume(turn, Until(layer=layer))
    assert caught.value.param == "until.layer"
    driver.run(turn)
    assert turn.tokens == expected


def test_states_that_do_not_allow_a_command_are_named(driver: BreakDriver, expected: list[int]) -> None:
    turn = paused_turn(driver, 1)
    with pytest.raises(WrongState, match="paused"):
        driver.begin(turn.session, [4], 1)
    with pytest.raises(WrongState, match="paused"):
        driver.do(Rewind(driver.ticket(), turn.session, 2))
    driver.run(turn)
    assert turn.tokens == expected
    nobody = SessionId("nobody")
    for missing, error in ((turn, WrongState), (Turn(driver.events, nobody, []), NotFound)):
        with pytest.raises(error):
            driver.resume(missing)
    with pytest.raises(NotFound):
        driver.arm(nobody, 1)


def test_a_turn_that_cannot_pause_passes_breakpoints_and_refuses_new_ones(
    driver: BreakDriver, expected: list[int]
) -> None:
    session = driver.open_armed(1)
    turn = driver.begin(session, START, COUNT, pausable=False)
    driver.advance()
    with pytest.raises(WrongState):
        driver.arm(session, 2)
    driver.arm(session, 2, action=Action.CAPTURE)
    driver.settle(turn)
    assert turn.tokens == expected
    assert driver.captures(session).records


def test_what_is_armed_in_the_middle_of_a_turn_stops_it(driver: BreakDriver, expected: list[int]) -> None:
    session = driver.open()
    turn = driver.begin(session, START, COUNT)
    while len(turn.tokens) < 3:
        driver.advance()
    driver.arm(session, 1)
    driver.settle(turn)
    assert places([turn.checkpoint]) == [(1, 12, 13)]
    driver.arm(session, 0, 3)
    driver.go_on(turn)
    assert places([turn.checkpoint]) == [(3, 12, 13)]
    driver.disarm(session)
    driver.go_on(turn)
    assert turn.tokens == expected


def test_a_pause_outlives_its_breakpoint(driver: BreakDriver, expected: list[int]) -> None:
    turn = paused_turn(driver, 1)
    made = turn.checkpoint.breakpoint
    for _ in range(2):
        driver.do(Disarm(driver.ticket(), turn.session, made))
        assert turn.paused
    assert len(driver.run(turn)) == 1
    assert turn.tokens == expected


def test_scored_prompts_are_scored_all_the_same(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    sampling = SamplingParams(seed=0, temperature=0, prompt_logprobs=1)
    scores = []
    for layers in ((), (0, 2)):
        session = driver.open()
        if layers:
            driver.arm(session, *layers)
        turn = driver.begin(session, START, 2, sampling)
        driver.run(turn)
        said = [event for ticket in turn.tickets for event in driver.events[ticket]]
        [scored] = [event.logprobs for event in said if isinstance(event, PromptScored)]
        scores.append([(entry.token_id, entry.logprob) for entry in scored])
    assert [token for token, _ in scores[1]] == START[1:]
    assert [score for _, score in scores[1]] == pytest.approx([score for _, score in scores[0]], abs=1e-4)


def test_a_stop_token_ends_a_turn_that_pauses(driver: BreakDriver, expected: list[int]) -> None:
    session = driver.open_armed(1)
    stop = StopRule(COUNT, stop_token_ids=frozenset({expected[3]}))
    turn = driver.begin(session, START, COUNT, stop=stop)
    driver.run(turn)
    assert turn.end.reason is FinishReason.STOP
    assert turn.tokens == expected[: expected.index(expected[3]) + 1]


PROMPTS = [prompt(seed, length) for seed, length in enumerate([3, 30, 17, 1, 24, 9, 31, 12, 5, 20])]


@pytest.mark.parametrize(("shape", "layers"), [("tiny_gpt2", (3, 6, 9)), ("tiny_mistral", (8, 16, 24))])
def test_inside_a_busy_batch(shape: str, layers: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    """Every other session pauses, some at one layer and some at three, and all go on at random."""
    model: TinyModel = request.getfixturevalue(shape)
    driver, count = BreakDriver(model.engine(blocks=700)), 12
    turns = []
    for number, tokens in enumerate(PROMPTS):
        for armed in [(), layers[number % 3 : number % 3 + 1] if number % 2 else layers]:
            session = driver.open_armed(*armed) if armed else driver.open()
            # The first token differs, so that no session finds its whole prefix computed by another.
            history = [3 + number, *tokens, 3 + len(armed)]
            turns.append((driver.begin(session, history, count), history))
    driver.run_together([turn for turn, _ in turns], random.Random(1))
    for turn, history in turns:
        assert len(turn.tokens) == count
        assert turn.tokens == greedy_after(model.oracle, history, turn.tokens)
    segments = [segment for step in driver.segments() for segment in step]
    assert any(segment.lo in {layer + 1 for layer in layers} and len(segment.rows) > 1 for segment in segments)


def test_sampled_tokens_are_those_of_the_seed(tiny_gpt2: TinyModel) -> None:
    sampling = SamplingParams(seed=5, temperature=1.0, repetition_penalty=1.2)
    undisturbed = BreakDriver(tiny_gpt2.engine()).generate(PROMPTS[1], 20, sampling)
    driver = BreakDriver(tiny_gpt2.engine())
    turn = driver.begin(driver.open_armed(3, 6, 9), PROMPTS[1], 20, sampling)
    driver.run(turn)
    assert turn.tokens == undisturbed
    assert len(set(turn.tokens)) > 3


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
