"""Where breakpoints stop a turn, how far it is resumed, and what it says: what Transformers would, in any company."""

import random

import pytest

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import Pass, Until, When
from app.domain.values import SamplingParams
from app.messages import PromptScored
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt
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


def test_a_pause_is_stepped_through_the_layers_and_from_token_to_token(
    driver: BreakDriver, expected: list[int]
) -> None:
    turn = paused_turn(driver, 0, when=When(Pass.PREFILL))
    for layer in (1, 2):
        driver.go_on(turn, Until(layer=layer))
        assert places([turn.checkpoint]) == [(layer, 0, 10)]
    for position in (10, 11):
        driver.go_on(turn, Until(next_token=True))
        assert places([turn.checkpoint]) == [(2, position, position + 1)]
        assert turn.tokens == expected[: position - 9]
    driver.go_on(turn)
    assert turn.tokens == expected


def test_until_a_layer_stops_at_a_breakpoint_before_it(driver: BreakDriver) -> None:
    turn = paused_turn(driver, 0, 1)
    driver.go_on(turn, Until(layer=3))
    assert places([turn.checkpoint]) == [(1, 0, 10)]


def test_until_the_end_passes_breakpoints_in_this_turn_only(driver: BreakDriver, expected: list[int]) -> None:
    turn = paused_turn(driver, 1)
    assert places(driver.run(turn, Until(end=True))) == [(1, 0, 10)]
    assert turn.tokens == expected
    again = driver.turn(turn.session, [5], 2)
    assert again.paused


@pytest.mark.parametrize("tokens", range(3, 3 + BLOCK))
def test_what_is_armed_in_the_middle_of_a_turn_stops_its_next_token(
    driver: BreakDriver, expected: list[int], tokens: int
) -> None:
    """Wherever in its block that is."""
    turn = driver.begin(driver.open(), START, COUNT)
    while len(turn.tokens) < tokens:
        driver.advance()
    at = len(START) - 1 + len(turn.tokens)
    driver.arm(turn.session, 1)
    driver.settle(turn)
    driver.arm(turn.session, 0, 3)
    pauses = [turn.checkpoint]
    driver.go_on(turn)
    assert places([*pauses, turn.checkpoint]) == [(1, at, at + 1), (3, at, at + 1)]
    driver.disarm(turn.session)
    driver.go_on(turn)
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
