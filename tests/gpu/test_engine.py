"""The engine's tokens against Transformers' `generate`: alone, in company and in a pool that is too small. A step that
goes wrong ends its turns, and nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from app.domain.errors import ContextTooLong, EngineError
from app.domain.values import FinishReason, KVPolicy, Phase, SamplingParams, SessionId, StopRule, Ticket
from app.gpu.device import hardware
from app.gpu.device.hardware import DeviceLost
from app.messages import Cancel, Event, Failed, Open, PromptScored, Rewind, Submit, Token, TurnFinished
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import GREEDY, Driver
from tests.gpu.tiny_engine import BLOCK, driver, make_engine, model, oracle, prompt
from tests.gpu.tiny_engine import greedy_tokens as expected

__all__ = ["driver", "model", "oracle"]


@pytest.fixture(scope="module", params=["auto", pytest.param("bfloat16", marks=pytest.mark.long), "float16"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_tokens_are_transformers_alone_and_beside_prompts_longer_than_a_step(driver: Driver, oracle: Any) -> None:
    prompts = [prompt(seed, length) for seed, length in enumerate([40, 2, 17, 4, 33, 8, 1, 25, 16, 9, 5, 12])]
    wanted = [expected(oracle, tokens, 10) for tokens in prompts]
    assert [driver.generate(tokens, 10) for tokens in prompts[:7]] == wanted[:7]
    turns = [driver.submit(driver.open(), tokens, 10) for tokens in prompts]
    driver.finish(*turns)
    assert [driver.tokens(turn) for turn in turns] == wanted


def test_a_pool_that_is_too_small_slows_turns_down_and_changes_nothing(
    model: ResolvedModel, oracle: Any, kv_dtype: str
) -> None:
    driver = Driver(make_engine(model, kv_dtype=kv_dtype, blocks=14))
    prompts = [prompt(seed, 20) for seed in range(6)]
    turns = [driver.submit(driver.open(), tokens, 20) for tokens in prompts]
    driver.finish(*turns)
    for turn, tokens in zip(turns, prompts, strict=True):
        assert driver.tokens(turn) == expected(oracle, tokens, 20)
    assert any(driver.end(turn).usage.tokens_recomputed for turn in turns)


@pytest.mark.parametrize(("spare", "found"), [(6, 4 * BLOCK), (2, BLOCK)])
def test_a_history_that_was_cut_is_found_again_while_there_is_room(
    driver: Driver, oracle: Any, spare: int, found: int
) -> None:
    session, start, pool = driver.open(), prompt(10, 20), driver.scheduler.cache.pool
    driver.answer(session, start, 1)
    driver.do(Rewind(driver.ticket(), session, BLOCK + 2))
    taken = pool.allocate(pool.available - spare)
    driver.answer(session, prompt(11, 9), 1)
    pool.release(taken)
    turn = driver.answer(driver.open(), start, 6)
    assert driver.tokens(turn) == expected(oracle, start, 6)
    assert driver.end(turn).usage.cached_tokens == found


@pytest.mark.parametrize("parks", [False, True])
def test_a_session_that_changes_its_history_takes_the_longest_prefix_there_is(
    driver: Driver, oracle: Any, parks: bool
) -> None:
    """Its own of two turns ago, or that of another session, on the device or on the host."""
    system, session, other = prompt(1, 2 * BLOCK + 1), driver.open(), driver.open()
    tasks = [[*system, *prompt(seed, 30)] for seed in (2, 3, 4)]
    driver.answer(other, tasks[2], 4)
    for task, cached in [(0, 2 * BLOCK), (1, 2 * BLOCK + 1), (0, 36), (1, 36), (2, 36), (2, 38)]:
        turn = driver.answer(session, tasks[task], 4, replace=True)
        assert driver.tokens(turn) == expected(oracle, tasks[task], 4)
        usage = driver.end(turn).usage
        assert (usage.cached_tokens, usage.tokens_recomputed) == (cached, 0)
        if parks:
            for each in (session, other):
                driver.signal(each, Phase.IO_WAIT)


def test_cancel_keeps_what_it_is_told_to_keep(driver: Driver, oracle: Any) -> None:
    session = driver.open()
    turn = driver.submit(session, prompt(7, 6), 50)
    while len(driver.events.get(turn, [])) < 6:
        driver.take(driver.engine.step())
    kept = driver.tokens(turn)[:2]
    assert driver.do(Cancel(driver.ticket(), session, turn, 2, FinishReason.STOP)) == 8
    assert driver.end(turn).reason is FinishReason.STOP
    assert driver.end(turn).usage.completion_tokens == 2
    after = driver.answer(session, [5], 5)
    assert driver.tokens(after) == expected(oracle, [*prompt(7, 6), *kept, 5], 5)
    assert driver.do(Cancel(driver.ticket(), session, after, 3, FinishReason.STOP)) == 12, "the turn has ended"


def test_prompt_logprobs_are_transformers_log_softmax(driver: Driver, oracle: Any) -> None:
    tokens = prompt(8, 37)
    session = driver.open()
    turn = driver.answer(session, tokens, 0, SamplingParams(seed=0, prompt_logprobs=2))
    [scored] = [event for event in driver.events[turn] if isinstance(event, PromptScored)]
    with torch.inference_mode():
        reference = torch.log_softmax(oracle(torch.tensor([tokens])).logits[0], dim=-1)
    assert [entry.token_id for entry in scored.logprobs] == tokens[1:]
    for position, entry in enumerate(scored.logprobs):
        assert entry.logprob == pytest.approx(float(reference[position, tokens[position + 1]]), abs=1e-4)
        assert entry.top[0][0] == int(reference[position].argmax())
    assert driver.end(turn).usage.completion_tokens == 0


@pytest.mark.parametrize(("policy", "host_blocks"), [(KVPolicy.NONE, 0), (KVPolicy.LRU, 50)])
def test_a_prompt_that_gives_way_half_scored_is_scored_all_the_same(
    model: ResolvedModel, policy: KVPolicy, host_blocks: int, kv_dtype: str
) -> None:
    driver = Driver(
        make_engine(model, kv_dtype=kv_dtype, blocks=12, max_step_tokens=4, policy=policy, host_blocks=host_blocks)
    )
    alone = Driver(make_engine(model, kv_dtype=kv_dtype))
    scoring = SamplingParams(seed=0, temperature=0, prompt_logprobs=0)
    elder = driver.submit(driver.open(), prompt(1, 12), 30)
    while not driver.tokens(elder):
        driver.take(driver.engine.step())
    turn = driver.submit(driver.open(), prompt(8, 28), 4, scoring)
    driver.finish(elder, turn)
    expected_turn = alone.answer(alone.open(), prompt(8, 28), 4, scoring)
    assert (driver.end(turn).usage.tokens_recomputed > 0) == (policy is KVPolicy.NONE)
    assert policy is KVPolicy.NONE or driver.memory().moves["in"].moves
    [found], [wanted] = (
        [event for event in events if isinstance(event, PromptScored)]
        for events in (driver.events[turn], alone.events[expected_turn])
    )
    assert [entry.token_id for entry in found.logprobs] == [entry.token_id for entry in wanted.logprobs]
    assert [e.logprob for e in found.logprobs] == pytest.approx([e.logprob for e in wanted.logprobs], abs=1e-4)


def test_a_context_that_cannot_fit_is_refused_and_one_that_has_grown_so_long_ends_its_turn(
    driver: Driver, oracle: Any
) -> None:
    session, limit = driver.open(), driver.engine.info.max_model_len
    history = [*prompt(1, 5), *driver.tokens(driver.answer(session, prompt(1, 5), 3)), 2]
    with pytest.raises(ContextTooLong, match=str(limit)):
        driver.submit(session, [1] * limit, 1)
    turn = driver.answer(session, [2], 3)
    assert driver.tokens(turn) == expected(oracle, history, 3)
    turn = driver.answer(session, prompt(1, limit - 16), 100)
    assert driver.end(turn).reason is FinishReason.LENGTH
    assert driver.end(turn).history_tokens == limit


def raise_cuda_error(*_: object) -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("head", "says"),
    [(lambda *_: 1 / 0, "division"), (raise_cuda_error, "illegal memory access")],
    ids=["bug", "device"],
)
def test_a_step_that_fails_ends_its_turns_and_leaves_the_engine_running(
    driver: Driver, oracle: Any, head: Callable[..., object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = driver.open()
    first = driver.answer(session, prompt(3, 6), 4)
    before = prompt(3, 6) + driver.tokens(first)
    turn = driver.submit(session, prompt(9, 6), 10)
    with monkeypatch.context() as patch:
        patch.setattr(driver.runner.stack, "head", head)
        [failed] = driver.engine.step()[-1:]
    assert isinstance(failed, Failed)
    assert (failed.ticket, says in str(failed.error)) == (turn, True)
    again = driver.answer(session, [4], 5, GREEDY)
    assert driver.tokens(again) == expected(oracle, [*before, 4], 5)


def test_turns_whose_logits_are_no_numbers_fail_and_no_others(
    driver: Driver, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, embed = [expected(oracle, prompt(seed, 6), 12) for seed in (3, 9)], driver.runner.stack.embed
    seen = {*prompt(3, 6), *prompt(9, 6), *wanted[1]}
    at, bad = next((at, token) for at, token in enumerate(wanted[0]) if token not in {*seen, *wanted[0][:at]})

    def broken(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return embed(token_ids, positions).masked_fill((token_ids == bad)[:, None], torch.nan)

    monkeypatch.setattr(driver.runner.stack, "embed", broken)
    drawn, scored = SamplingParams(seed=0, top_p=0.9), SamplingParams(seed=0, prompt_logprobs=0)
    turns = [driver.submit(driver.open(), prompt(seed, 6), 12) for seed in (3, 9)]
    turns += [driver.submit(driver.open(), [4, bad, 6], 9, params) for params in (drawn, scored)]
    failed = list[Failed]()
    while len(failed) < 3 or not driver.ended(turns[1]):
        events = driver.engine.step()
        failed += [event for event in events if isinstance(event, Failed)]
        driver.take([event for event in events if event not in failed])
    assert [driver.tokens(each) for each in turns] == [wanted[0][: at + 1], wanted[1], [], []]
    assert all("logits are not finite" in each.error.message for each in failed)


def test_a_device_that_does_not_recover_ends_the_engine(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.submit(driver.open(), prompt(3, 6), 4)
    monkeypatch.setattr(driver.runner.stack, "head", raise_cuda_error)
    monkeypatch.setattr(hardware, "probe", raise_cuda_error)
    with pytest.raises(DeviceLost, match="does not recover: CUDA error: an illegal memory access"):
        driver.engine.step()


def test_a_step_that_cannot_be_planned_fails_its_turns_and_leaves_the_engine_running(
    model: ResolvedModel, kv_dtype: str, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, failures = make_engine(model, kv_dtype=kv_dtype), iter([True])
    plan, names = engine._scheduler.plan, [SessionId(f"s{number}") for number in range(3)]
    monkeypatch.setattr(engine._scheduler, "plan", lambda: 1 / 0 if next(failures, False) else plan())
    for number, name in enumerate(names):
        engine.send(Open(Ticket(number), name))
        engine.send(Submit(Ticket(10 + number), name, tuple(prompt(9, 6)), GREEDY, StopRule(10)))
    failed, said = list[Failed](), list[int]()

    def deliver(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Failed):
                failed.append(event)
                if len(failed) == len(names):
                    engine.send(Submit(Ticket(20), names[0], (4, 5), GREEDY, StopRule(5)))
            elif isinstance(event, Token):
                said.append(event.token_id)
            elif isinstance(event, TurnFinished):
                engine.stop()

    engine.run(deliver)
    assert {each.ticket for each in failed} == {Ticket(10 + number) for number in range(3)}
    assert all(isinstance(each.error, EngineError) and "division" in each.error.message for each in failed)
    assert said == expected(oracle, [4, 5], 5)
