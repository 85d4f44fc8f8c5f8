"""Where breakpoints stop a turn, how far it is resumed, and what it says: what Transformers would, in any company."""

import pytest

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import Pass, When
from app.domain.values import SamplingParams
from app.messages import PromptScored
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import greedy

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
