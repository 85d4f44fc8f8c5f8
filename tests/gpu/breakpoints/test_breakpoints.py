"""Where breakpoints stop a turn, how far it is resumed, and what a session can be asked for while it is paused."""

from __future__ import annotations

import pytest

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import Action, Pass, Until, When
from app.domain.errors import FieldOutOfRange, NotFound, WrongState
from app.domain.values import FinishReason, SamplingParams, SessionId, StopRule
from app.messages import Arm, Disarm, PromptScored, Rewind
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import greedy

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
    session = driver.open()
    driver.arm(session, *layers, when=when or When())
    turn = driver.begin(session, START, COUNT)
    driver.settle(turn)
    assert turn.paused
    return turn


def places(pauses: list[CheckpointInfo]) -> list[tuple[int, int, int]]:
    return [(pause.layer, pause.first, pause.end) for pause in pauses]


def pauses_when(driver: BreakDriver, when: When, expected: list[int]) -> list[tuple[int, int]]:
    session = driver.open()
    driver.arm(session, 1, when=when)
    turn = driver.begin(session, START, COUNT)
    pauses = driver.run(turn)
    assert turn.tokens == expected
    return [(pause.first, pause.end) for pause in pauses]


def decodes(*positions: int) -> list[tuple[int, int]]:
    return [(position, position + 1) for position in positions]


def test_the_pass(driver: BreakDriver, expected: list[int]) -> None:
    assert pauses_when(driver, When(Pass.PREFILL), expected) == [(0, 10)]
    assert pauses_when(driver, When(Pass.DECODE), expected) == decodes(*range(10, 17))


def test_a_position(driver: BreakDriver, expected: list[int]) -> None:
    assert pauses_when(driver, When(position=9), expected) == [(0, 10)]
    assert pauses_when(driver, When(position=13), expected) == decodes(13)
    assert pauses_when(driver, When(position=17), expected) == []


def test_every_so_many_positions(driver: BreakDriver, expected: list[int]) -> None:
    assert pauses_when(driver, When(Pass.DECODE, every=4), expected) == decodes(12, 16)


def test_a_token(driver: BreakDriver, expected: list[int]) -> None:
    token = expected[2]
    wanted = [10 + k for k, found in enumerate(expected[:-1]) if found == token]
    assert pauses_when(driver, When(Pass.DECODE, token_id=token), expected) == decodes(*wanted)


def test_all_conditions_have_to_hold(driver: BreakDriver, expected: list[int]) -> None:
    when = When(Pass.DECODE, position=12, token_id=expected[2], every=3)
    assert pauses_when(driver, when, expected) == decodes(12)
    assert pauses_when(driver, When(Pass.DECODE, position=12, every=5), expected) == []
    assert pauses_when(driver, When(Pass.PREFILL, position=12), expected) == []


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
    driver.resume(turn, Until(layer=3))
    driver.settle(turn)
    assert turn.checkpoint.breakpoint is None


def test_the_first_and_the_last_layer(driver: BreakDriver, expected: list[int]) -> None:
    turn = paused_turn(driver, 0, 3)
    assert places(driver.run(turn))[:3] == [(0, 0, 10), (3, 0, 10), (0, 10, 11)]
    assert turn.tokens == expected


def test_until_a_layer_steps_through_the_pass(driver: BreakDriver, expected: list[int]) -> None:
    turn = paused_turn(driver, 0, when=When(Pass.DECODE))
    for layer in (1, 2, 3):
        driver.resume(turn, Until(layer=layer))
        driver.settle(turn)
        assert places([turn.checkpoint]) == [(layer, 10, 11)]
    driver.resume(turn)
    driver.settle(turn)
    assert places([turn.checkpoint]) == [(0, 11, 12)]
    assert driver.run(turn, Until(end=True))
    assert turn.tokens == expected


def test_until_a_layer_stops_at_a_breakpoint_before_it(driver: BreakDriver) -> None:
    turn = paused_turn(driver, 0, 1)
    driver.resume(turn, Until(layer=3))
    driver.settle(turn)
    assert places([turn.checkpoint]) == [(1, 0, 10)]


def test_until_the_next_token_stops_at_the_same_layer_of_its_pass(driver: BreakDriver, expected: list[int]) -> None:
    turn = paused_turn(driver, 2, when=When(Pass.PREFILL))
    for position in (10, 11):
        driver.resume(turn, Until(next_token=True))
        driver.settle(turn)
        assert places([turn.checkpoint]) == [(2, position, position + 1)]
        assert turn.tokens == expected[: position - 9]
    driver.resume(turn)
    driver.settle(turn)
    assert turn.tokens == expected
    assert turn.end.reason is FinishReason.LENGTH


def test_until_the_end_passes_breakpoints_in_this_turn_only(driver: BreakDriver, expected: list[int]) -> None:
    turn = paused_turn(driver, 1)
    assert places(driver.run(turn, Until(end=True))) == [(1, 0, 10)]
    assert turn.tokens == expected
    again = driver.begin(turn.session, [5], 2)
    driver.settle(again)
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
    for missing, error in ((turn, WrongState), (Turn(driver.events, SessionId("nobody"), []), NotFound)):
        with pytest.raises(error):
            driver.resume(missing)


def test_a_turn_that_cannot_pause_passes_breakpoints_and_refuses_new_ones(
    driver: BreakDriver, expected: list[int]
) -> None:
    session = driver.open()
    driver.arm(session, 1)
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
    driver.resume(turn)
    driver.settle(turn)
    assert places([turn.checkpoint]) == [(3, 12, 13)]
    driver.do(Disarm(driver.ticket(), session))
    driver.resume(turn)
    driver.settle(turn)
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
    session = driver.open()
    driver.arm(session, 1)
    stop = StopRule(COUNT, stop_token_ids=frozenset({expected[3]}))
    turn = driver.begin(session, START, COUNT, stop=stop)
    driver.run(turn)
    assert turn.end.reason is FinishReason.STOP
    assert turn.tokens == expected[: expected.index(expected[3]) + 1]


def test_arming_in_a_session_that_is_not_there(driver: BreakDriver) -> None:
    made = driver.arm(driver.open(), 1)
    with pytest.raises(NotFound):
        driver.do(Arm(driver.ticket(), SessionId("nobody"), made))
