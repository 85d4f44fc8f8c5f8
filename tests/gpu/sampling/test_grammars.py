"""Turns under a grammar: whatever a random model would say, what it says matches."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from app.domain.errors import GrammarTooComplex
from app.domain.grammar import Grammar
from app.domain.values import FinishReason, KVPolicy, SamplingParams, StopRule
from app.gpu.device.streams import CpuStreams
from app.gpu.sampling.masks import MaskThread
from app.gpu.sampling.requests import SampleRequest
from app.grammars import matcher as matchers
from app.messages import Failed, Submit, Token
from app.model_store.byte_tokenizer import EOS_ID, IM_END_ID
from app.model_store.resolve import resolve
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.tiny_engine import make_engine, prompt
from tests.grammars.schemas import json_grammar, random_schema, regex

pytestmark = pytest.mark.usefixtures("one_thread")

STOP = StopRule(400, stop_token_ids=frozenset({EOS_ID, IM_END_ID}))
SCHEMAS = [random_schema(seed) for seed in range(48)]


def under(grammar: Grammar | None, seed: int = 0, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(seed, temperature, grammar=grammar)


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


def test_answers_match_alone_and_in_company_and_are_the_same(driver: BreakDriver) -> None:
    alone = []
    for seed, schema in enumerate(SCHEMAS[:16]):
        turn = begin(driver, seed, json_grammar(schema))
        driver.settle(turn)
        alone.append(turn.tokens)
    together = [begin(driver, seed, json_grammar(schema)) for seed, schema in enumerate(SCHEMAS[:16])]
    driver.settle(*together)
    assert [turn.tokens for turn in together] == alone
    finished = [check(turn, schema) for turn, schema in zip(together, SCHEMAS, strict=False)]
    assert sum(finished) >= 12


def test_answers_match_through_preemption(driver: BreakDriver) -> None:
    calm = [begin(driver, seed, json_grammar(schema)) for seed, schema in enumerate(SCHEMAS)]
    driver.settle(*calm)
    full = make_driver(blocks=80, host_blocks=120, policy=KVPolicy.SIGNAL)
    with contextlib.closing(full.engine):
        turns = [begin(full, seed, json_grammar(schema)) for seed, schema in enumerate(SCHEMAS)]
        full.settle(*turns)
    assert any(plan.gave_way for plan in full.plans)
    finished = [check(turn, schema) for turn, schema in zip(turns, SCHEMAS, strict=True)]
    assert sum(finished) >= 40
    assert [turn.tokens for turn in turns] == [turn.tokens for turn in calm]


def test_a_turn_without_a_grammar_says_the_same_beside_turns_with_one(driver: BreakDriver) -> None:
    plain = begin(driver, 5, None, StopRule(60))
    driver.settle(plain)
    beside = [begin(driver, seed, json_grammar(schema)) for seed, schema in enumerate(SCHEMAS[:4])]
    again = begin(driver, 5, None, StopRule(60))
    driver.settle(*beside, again)
    assert again.tokens == plain.tokens


def test_forks_of_a_paused_turn_go_on_in_the_grammar(driver: BreakDriver) -> None:
    grammar = regex("(ab|ba){40}(c|d)")
    undisturbed = driver.begin(driver.open(), prompt(1, 20), 0, under(grammar, 1), stop=STOP)
    driver.settle(undisturbed)
    session = driver.open()
    turn = driver.begin(session, prompt(1, 20), 0, under(grammar, 1), stop=STOP)
    for _ in range(12):
        driver.advance()
    driver.arm(session, 1, once=True)
    driver.settle(turn)
    assert turn.paused
    child = driver.fork(turn)
    for each in (turn, child):
        driver.run(each)
    assert turn.tokens == undisturbed.tokens
    assert child.tokens[-20:] == undisturbed.tokens[-20:]


def test_a_text_that_can_only_end_ends_the_turn_though_no_stop_token_is_asked_for(driver: BreakDriver) -> None:
    turn = driver.begin(driver.open(), prompt(0, 9), 0, under(regex("abc")), stop=StopRule(50))
    driver.settle(turn)
    assert (text(turn), turn.end.reason) == ("abc", FinishReason.STOP)
    open_end = driver.begin(driver.open(), prompt(0, 9), 0, under(regex("a{3,}")), stop=StopRule(400))
    driver.settle(open_end)
    assert open_end.end.reason is FinishReason.STOP
    assert open_end.tokens[-1] in (EOS_ID, IM_END_ID)


def test_a_turn_at_its_limit_ends_as_length(driver: BreakDriver) -> None:
    turn = driver.begin(driver.open(), prompt(0, 9), 0, under(regex("a{30}")), stop=StopRule(10))
    driver.settle(turn)
    assert (text(turn), turn.end.reason) == ("a" * 10, FinishReason.LENGTH)


def test_a_bias_does_not_bring_back_what_the_grammar_forbids(driver: BreakDriver) -> None:
    sampling = replace(under(regex("[ab]{30}")), logit_bias={ord("x"): 100.0}, repetition_penalty=1.5, top_p=0.9)
    turn = driver.begin(driver.open(), prompt(0, 9), 0, sampling, stop=STOP)
    driver.settle(turn)
    assert set(text(turn)) <= {"a", "b"}


def test_log_probabilities_are_those_of_the_model_itself(driver: BreakDriver) -> None:
    sampling = replace(under(regex("a{5}")), logprobs=3)
    turn = driver.begin(driver.open(), prompt(0, 9), 0, sampling, stop=STOP)
    driver.settle(turn)
    reported = [event.logprobs for event in driver.events[turn.tickets[0]] if isinstance(event, Token)]
    assert len(reported) == 5
    assert all(found is not None and len(found.top) == 3 and found.logprob < found.top[0][1] for found in reported)


def test_a_grammar_that_becomes_too_slow_fails_its_turn_and_no_other(
    driver: BreakDriver,
) -> None:
    good = begin(driver, 1, regex("b{40}"))
    bad = driver.open()
    ticket = driver.ticket()
    driver.take(driver.engine.handle(Submit(ticket, bad, tuple(prompt(2, 20)), under(regex("a{40}")), STOP)))
    running = driver.engine._scheduler.queue.running
    while bad not in running:
        driver.advance()
    slow = running[bad].turn.matcher
    assert slow is not None
    slow._error = "the tokens that may follow took 0.7 s to compute"
    with pytest.raises(GrammarTooComplex, match="became too complex at token") as caught:
        driver.settle(good)
    assert caught.value.param == "structured_outputs.regex"
    driver.settle(good)
    assert text(good) == "b" * 40


def test_a_mask_that_takes_too_long_is_an_error(driver: BreakDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matchers, "MAX_MASKS_S", -1.0)
    ticket, session = driver.ticket(), driver.open()
    submit = Submit(ticket, session, tuple(prompt(2, 20)), under(regex("a{40}")), STOP)
    events = [*driver.engine.handle(submit)]
    while not any(isinstance(event, Failed) for event in events):
        events += driver.engine.step()
    failed = events[-1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, GrammarTooComplex)


class SomeDevice(CpuStreams):
    """A device that is not the host."""

    on_host = False


@pytest.mark.parametrize("vocab_size", [512, 519])
def test_masks_are_the_same_on_the_host_and_on_a_device(driver: BreakDriver, vocab_size: int) -> None:
    """Also with logits that the tokenizer has no tokens for."""
    rows = ["[a-c]", None, ".", "é"]
    requests = [
        SampleRequest(
            under(None), [1], 1, frozenset(), 1, None if row is None else driver.engine.grammars.match(regex(row), ())
        )
        for row in rows
    ]
    logits = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))[:, :vocab_size]
    found = []
    for streams in (CpuStreams(), SomeDevice()):
        mask = MaskThread().begin(requests, logits.shape[1], streams, torch.from_numpy)
        assert mask is not None
        masked = logits.clone()
        mask.apply(masked)
        found.append(masked)
    assert torch.equal(*found)
    assert found[0][0].isfinite().nonzero()[:, 0].tolist() == [97, 98, 99]
    assert torch.equal(found[0][1], logits[1])
    assert np.isfinite(found[0][3].numpy()).nonzero()[0].tolist() == ["é".encode()[0]]


def test_masks_that_are_slow_together_are_an_error_though_none_of_them_is(
    driver: BreakDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "thread_time", count(step=0.004).__next__)  # 4 ms for each of its calls
    slow = driver.engine.grammars.match(regex("a{40}"), ())
    bits = np.zeros(16, np.int32)
    for number in range(matchers.COUNTED_MASKS):
        slow.fill(bits.ctypes.data, bits.nbytes)
        assert slow.error is None, number
    monkeypatch.setattr(time, "thread_time", count(step=0.007).__next__)
    for _ in range(matchers.COUNTED_MASKS):
        slow.fill(bits.ctypes.data, bits.nbytes)
    assert slow.error is not None


def test_the_masks_of_an_abandoned_step_do_not_run_on(driver: BreakDriver) -> None:
    threads, held = MaskThread(), threading.Event()
    requests = [SampleRequest(under(None), [1], 1, frozenset(), 1, driver.engine.grammars.match(regex("a"), ()))]
    threads._thread.submit(held.wait)
    mask = threads.begin(requests, 512, CpuStreams(), torch.from_numpy)
    assert mask is not None
    mask._bits.zero_()
    mask.abandon()
    held.set()
    threads._thread.submit(int).result()
    assert not mask._bits.any()
