"""Tokens of turns that pause at every pass are those of turns that do not, and Transformers' own."""

from __future__ import annotations

import random

import pytest

from app.domain.breakpoints import Pass
from app.domain.values import SamplingParams
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import FULL, TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import greedy
from tests.gpu.oracle import greedy_after

pytestmark = pytest.mark.usefixtures("one_thread")

SEQUENCES = 10
COUNT = 64 if FULL else 16
PROMPTS = [prompt(seed, length) for seed, length in enumerate([3, 30, 17, 1, 24, 9, 31, 12, 5, 20])]
SHAPES = [("tiny_gpt2", (3, 6, 9)), ("tiny_mistral", (8, 16, 24))]


@pytest.fixture(params=SHAPES, ids=["gpt2", "mistral"])
def shape(request: pytest.FixtureRequest) -> tuple[TinyModel, tuple[int, ...]]:
    """A model, and layers at a quarter, a half and three quarters of its height."""
    name, layers = request.param
    return request.getfixturevalue(name), layers


def expected_pauses(length: int, count: int, layers: tuple[int, ...]) -> list[tuple[int, int, int, Pass]]:
    """Layer, first position, end and pass: the prompt in one part, then each generated token but the last."""
    prefill = [(layer, 0, length, Pass.PREFILL) for layer in layers]
    decode = [(layer, p, p + 1, Pass.DECODE) for p in range(length, length + count - 1) for layer in layers]
    return prefill + decode


def test_alone(shape: tuple[TinyModel, tuple[int, ...]]) -> None:
    model, layers = shape
    undisturbed, driver = BreakDriver(model.engine()), BreakDriver(model.engine())
    for tokens in PROMPTS if FULL else PROMPTS[:4]:
        session = driver.open()
        driver.arm(session, *layers)
        turn = driver.begin(session, tokens, COUNT)
        pauses = driver.run(turn)
        assert [(p.layer, p.first, p.end, p.in_pass) for p in pauses] == expected_pauses(len(tokens), COUNT, layers)
        assert turn.tokens == undisturbed.generate(tokens, COUNT) == greedy_after(model.oracle, tokens, turn.tokens)
        driver.close(session)
    assert driver.owned == 0


def test_inside_a_busy_batch(shape: tuple[TinyModel, tuple[int, ...]]) -> None:
    """Every other session pauses, some at one layer and some at three, and all go on at random."""
    model, layers = shape
    driver, chance = BreakDriver(model.engine(blocks=700)), random.Random(1)
    turns = []
    for number, tokens in enumerate(PROMPTS):
        for armed in [(), layers[number % 3 : number % 3 + 1] if number % 2 else layers]:
            session = driver.open()
            if armed:
                driver.arm(session, *armed)
            # The first token differs, so that no session finds its whole prefix computed by another.
            turns.append((driver.begin(session, [3 + number, *tokens, 3 + len(armed)], COUNT), number, len(armed)))
    driver.run_together([turn for turn, _, _ in turns], chance)
    for turn, number, armed_layers in turns:
        history = [3 + number, *PROMPTS[number], 3 + armed_layers]
        assert len(turn.tokens) == COUNT
        assert turn.tokens == greedy_after(model.oracle, history, turn.tokens)
    segments = [segment for step in driver.segments() for segment in step]
    assert any(segment.lo in {layer + 1 for layer in layers} and len(segment.rows) > 1 for segment in segments)


def test_sampled_tokens_are_those_of_the_seed(tiny_gpt2: TinyModel) -> None:
    sampling = SamplingParams(seed=5, temperature=1.0, repetition_penalty=1.2)
    undisturbed = BreakDriver(tiny_gpt2.engine()).generate(PROMPTS[1], 20, sampling)
    driver = BreakDriver(tiny_gpt2.engine())
    session = driver.open()
    driver.arm(session, 3, 6, 9)
    turn = driver.begin(session, PROMPTS[1], 20, sampling)
    driver.run(turn)
    assert turn.tokens == undisturbed
    assert len(set(turn.tokens)) > 3


def test_a_long_prompt_pauses_once_for_each_part_and_turns_go_on_from_there(tiny_gpt2: TinyModel) -> None:
    driver = BreakDriver(tiny_gpt2.engine(max_step_tokens=16))
    session, start = driver.open(), prompt(20, 40)
    driver.arm(session, 6)
    first = driver.begin(session, start, 2)
    pauses = driver.run(first)
    assert [(p.first, p.end) for p in pauses] == [(0, 16), (16, 32), (32, 40), (40, 41)]
    assert first.tokens == greedy(tiny_gpt2.oracle, start, 2)
    history = [*start, *first.tokens, 7]
    second = driver.begin(session, [7], 3)
    pauses = driver.run(second)
    assert [(p.first, p.end, p.in_pass) for p in pauses] == [
        (41, 43, Pass.PREFILL),
        (43, 44, Pass.DECODE),
        (44, 45, Pass.DECODE),
    ]
    assert second.tokens == greedy(tiny_gpt2.oracle, history, 3)
    assert second.end.usage.cached_tokens == 41


def test_prompts_in_parts_are_the_same_whatever_else_runs(tiny_gpt2: TinyModel) -> None:
    driver = BreakDriver(tiny_gpt2.engine(max_step_tokens=16))
    others = [driver.begin(driver.open(), prompt(30 + k, 5), 12) for k in range(4)]
    for _ in range(3):
        driver.advance()
    session, start = driver.open(), prompt(20, 40)
    driver.arm(session, 6)
    turn = driver.begin(session, start, 4)
    pauses = driver.run(turn)
    assert [(p.first, p.end) for p in pauses[:3]] == [(0, 16), (16, 32), (32, 40)]
    driver.settle(*others)
    assert turn.tokens == greedy(tiny_gpt2.oracle, start, 4)
