"""Turns under a grammar: whatever a random model would say, what it says matches."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from app.domain.errors import GrammarTooComplex
from app.domain.values import FinishReason, Grammar, KVPolicy, SamplingParams, StopRule
from app.grammars import matcher as matchers
from app.messages import Token
from app.model_store.resolve import resolve
from app.model_store.shapes import EOS_ID, IM_END_ID
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.tiny_engine import make_engine, prompt
from tests.grammars.schemas import json_grammar, random_schema, regex

pytestmark = pytest.mark.usefixtures("one_thread")

STOP = StopRule(400, stop_token_ids=frozenset({EOS_ID, IM_END_ID}))
SCHEMAS = [random_schema(seed) for seed in range(16)]


def under(grammar: Grammar | None, seed: int = 0) -> SamplingParams:
    return SamplingParams(seed, 1.0, grammar=grammar)


def make_driver(**options: Any) -> BreakDriver:
    return BreakDriver(make_engine(resolve("random:tiny-llama", cache_dir=Path()), **options))


@pytest.fixture
def driver() -> Iterator[BreakDriver]:
    made = make_driver(blocks=1600)
    yield made
    made.engine.close()


def begin(driver: BreakDriver, seed: int, grammar: Grammar | None, stop: StopRule = STOP) -> Turn:
    return driver.begin(driver.open(), prompt(seed, 20), 0, under(grammar, seed), stop=stop)


def text(turn: Turn) -> str:
    """What the turn has said; tokens below 256 are bytes."""
    tokens = [token for token in turn.tokens if token not in (EOS_ID, IM_END_ID)]
    return b"".join(bytes([token]) if token < 256 else f"<{token}>".encode() for token in tokens).decode()


def check(turn: Turn, schema: dict[str, Any]) -> bool:
    """Whether the turn has finished; then its text must match."""
    if turn.end.reason is not FinishReason.STOP:
        return False
    jsonschema.Draft202012Validator(schema).validate(json.loads(text(turn)))
    return True


def test_answers_match_alone_in_company_and_through_preemption_and_are_the_same(driver: BreakDriver) -> None:
    plain = begin(driver, 5, None, StopRule(60))
    driver.settle(plain)
    alone = []
    for seed, schema in enumerate(SCHEMAS):
        turn = begin(driver, seed, json_grammar(schema))
        driver.settle(turn)
        alone.append(turn.tokens)
    together = [begin(driver, seed, json_grammar(schema)) for seed, schema in enumerate(SCHEMAS)]
    beside = begin(driver, 5, None, StopRule(60))
    driver.settle(*together, beside)
    assert beside.tokens == plain.tokens, "a turn without a grammar"
    full = make_driver(blocks=80, host_blocks=120, policy=KVPolicy.SIGNAL)
    with contextlib.closing(full.engine):
        turns = [begin(full, seed, json_grammar(schema)) for seed, schema in enumerate(SCHEMAS)]
        full.settle(*turns)
    assert any(plan.preempted for plan in full.plans)
    for found in (together, turns):
        assert [turn.tokens for turn in found] == alone
    assert sum(check(turn, schema) for turn, schema in zip(together, SCHEMAS, strict=True)) >= 12


def test_a_text_that_can_only_end_ends_the_turn_and_so_does_its_limit(driver: BreakDriver) -> None:
    turn = driver.turn(driver.open(), prompt(0, 9), 0, under(regex("abc")), stop=StopRule(50))
    assert (text(turn), turn.end.reason) == ("abc", FinishReason.STOP)
    open_end = driver.turn(driver.open(), prompt(0, 9), 0, under(regex("a{3,}")), stop=StopRule(400))
    assert open_end.end.reason is FinishReason.STOP
    assert open_end.tokens[-1] in (EOS_ID, IM_END_ID)
    limited = driver.turn(driver.open(), prompt(0, 9), 0, under(regex("a{30}")), stop=StopRule(10))
    assert (text(limited), limited.end.reason) == ("a" * 10, FinishReason.LENGTH)


def test_a_bias_does_not_bring_back_what_the_grammar_forbids_and_log_probabilities_are_the_models(
    driver: BreakDriver,
) -> None:
    sampling = replace(under(regex("[ab]{30}")), logit_bias={ord("x"): 100.0}, repetition_penalty=1.5, top_p=0.9)
    turn = driver.turn(driver.open(), prompt(0, 9), 0, sampling, stop=STOP)
    assert set(text(turn)) <= {"a", "b"}

    sampling = replace(under(regex("a{5}")), logprobs=3)
    turn = driver.turn(driver.open(), prompt(0, 9), 0, sampling, stop=STOP)
    reported = [event.logprobs for event in turn.said if isinstance(event, Token)]
    assert len(reported) == 5
    assert all(found is not None and len(found.top) == 3 and found.logprob < found.top[0][1] for found in reported)


def test_a_mask_that_takes_too_long_fails_its_turn_and_no_other(
    driver: BreakDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matchers, "MAX_MASKS_S", -1.0)
    good = begin(driver, 5, None, StopRule(40))
    driver.begin(driver.open(), prompt(2, 20), 0, under(regex("a{40}")), stop=STOP)
    with pytest.raises(GrammarTooComplex, match="became too complex at token") as caught:
        driver.settle(good)
    assert caught.value.param == "structured_outputs.regex"
    driver.settle(good)
    assert len(good.tokens) == 40
