"""Whose prompt a step computes: the one nearest to its next token, but nobody waits for ever."""

from contextlib import closing
from itertools import pairwise
from math import ceil
from pathlib import Path

import pytest

from app.domain.breakpoints import When
from app.domain.values import KVPolicy, Phase, SessionId, Tier
from app.messages import Fork
from app.model_store.resolve import ResolvedModel
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.driving import Driver
from tests.gpu.tiny_engine import driver, make_engine, model

__all__ = ["driver", "model"]
pytestmark = pytest.mark.usefixtures("one_thread")

STEP_TOKENS = 16
LONG, SHORT = 100, 3
THREE_LAYERS = 3 * 147_968


def test_a_turn_that_goes_on_does_not_wait_for_long_first_prompts(driver: Driver) -> None:
    session = driver.open()
    driver.answer(session, prompt(0, LONG), 2)
    long = [driver.submit(driver.open(), prompt(seed, LONG), 2) for seed in (1, 2, 3)]
    driver.take(driver.engine.step())
    short = driver.submit(session, prompt(4, SHORT), 2)
    assert driver.steps_until_token(short) == 1
    assert not any(driver.tokens(turn) for turn in long)


def test_a_long_prompt_is_not_passed_over_for_ever(driver: Driver) -> None:
    """Short turns come with every step, and each of them could have all of it."""
    long, steps = driver.submit(driver.open(), prompt(1, LONG), 2), 0
    while not driver.tokens(long):
        for number in range(4):
            driver.submit(driver.open(), prompt(steps + number, SHORT), 1)
        driver.take(driver.engine.step())
        steps += 1
        assert steps < 400


def test_one_prompt_of_a_tenant_does_not_wait_behind_a_hundred_of_another(driver: Driver) -> None:
    many = [driver.submit(driver.open("many"), prompt(seed, SHORT), 1) for seed in range(100)]
    one = driver.submit(driver.open("one"), prompt(100, SHORT), 1)
    assert driver.steps_until_token(one) <= 4  # steps have half as many tokens as those of one tenant
    driver.finish(*many)


@pytest.mark.parametrize("meanwhile", [0, 1])
def test_a_tenant_with_few_prompts_has_saved_nothing_up(driver: Driver, meanwhile: int) -> None:
    """Neither one that comes back, nor one that had a small prompt now and then."""
    for seed in range(8):
        small = [driver.submit(driver.open("few"), prompt(90 + seed, 1), 1) for _ in range(meanwhile)]
        driver.finish(driver.submit(driver.open("many"), prompt(seed, LONG), 1), *small)
    turns = {
        tenant: [driver.submit(driver.open(tenant), prompt(first + number, LONG), 1) for number in range(6)]
        for tenant, first in (("many", 10), ("few", 30))
    }
    many = few = 0
    for _ in range(40 * LONG // STEP_TOKENS):
        if many + few < 6:
            driver.take(driver.engine.step())
            many, few = (sum(bool(driver.tokens(turn)) for turn in begun) for begun in turns.values())
    assert abs(many - few) <= 1 < many + few


def test_a_fork_is_of_its_parents_tenant(driver: Driver) -> None:
    parent, child = driver.open("many"), SessionId("child")
    driver.answer(parent, prompt(1, SHORT), 1)
    driver.do(Fork(driver.ticket(), parent, child))
    for seed in range(2, 60):
        driver.submit(driver.open("many"), prompt(seed, SHORT), 1)
    assert driver.steps_until_token(driver.submit(child, prompt(60, SHORT), 1)) > 10


def test_prompts_of_one_length_are_computed_one_after_the_other(driver: Driver) -> None:
    first, second = (driver.submit(driver.open(), prompt(seed, LONG), 1) for seed in (1, 2))
    driver.steps_until_token(first)
    assert not driver.tokens(second)


@pytest.mark.parametrize(("tenant", "steps"), [("", 16), ("other", 2 * 32 - 1)])
def test_prompts_leave_most_of_a_step_while_others_have_turns(model: ResolvedModel, tenant: str, steps: int) -> None:
    """A prompt of another tenant takes half of that part, in every second step."""
    driver = Driver(make_engine(model, max_draft_tokens=0))
    alone = driver.submit(driver.open(), prompt(1, 4 * STEP_TOKENS), 200)
    assert driver.steps_until_token(alone) == 4
    beside = driver.submit(driver.open(tenant), prompt(2, 4 * STEP_TOKENS), 1)
    assert driver.steps_until_token(beside) == steps


def test_prompts_do_not_rest_for_a_turn_whose_kv_is_on_its_way(model: ResolvedModel, tmp_path: Path) -> None:
    """It could not use a step that they leave."""
    driver = Driver(make_engine(model, host_blocks=100, policy=KVPolicy.SIGNAL, kv_dir=tmp_path))
    away, one, two = (driver.open(tenant) for tenant in ("away", "one", "two"))
    driver.answer(away, prompt(0, LONG), 2)
    driver.signal(away, Phase.IDLE)
    assert driver.sequence(away).tier is Tier.DISK
    turn = driver.submit(away, prompt(1, SHORT), 1)
    for seed, session in enumerate((one, two), 2):
        driver.submit(session, prompt(seed, LONG), 1)
        for _ in range(12):
            before = driver.sequence(one).computed + driver.sequence(two).computed
            driver.take(driver.engine.step())  # and nothing moves
            assert driver.sequence(one).computed + driver.sequence(two).computed > before
        if session is one:
            assert not driver.scheduler.queue.running[one].active_turn.skipped
    assert not driver.tokens(turn)
    driver.finish(turn)


def test_a_sweep_over_streamed_weights_computes_as_much_as_it_can(model: ResolvedModel, tmp_path: Path) -> None:
    engine = make_engine(model, max_step_tokens=STEP_TOKENS, weights_device=THREE_LAYERS, weights_dir=tmp_path)
    with closing(engine):
        driver = Driver(engine)
        driver.submit(driver.open(), prompt(1, 1), 40)
        driver.take(driver.engine.step())
        beside = driver.submit(driver.open(), prompt(2, 3 * (STEP_TOKENS - 1)), 1)
        assert driver.steps_until_token(beside) == 3


@pytest.mark.parametrize("other", ["many", "one"])
def test_rows_that_are_not_cut_leave_steps_to_those_who_decode(tiny_llama: TinyModel, other: str) -> None:
    """What prompts take beyond their part of a step, they do without in the next."""
    step_tokens, uncut = 64, 60
    driver = BreakDriver(tiny_llama.engine(max_step_tokens=step_tokens))
    driver.scheduler.fairness.prompt_tokens = step_tokens
    one = driver.submit(driver.open("one"), prompt(0, SHORT), 30)
    driver.steps_until_token(one)
    whole = []
    for seed in range(1, 6):
        session = driver.open(other)
        driver.arm(session, 1, when=When(token_id=500))  # never
        whole.append(driver.submit(session, prompt(seed, uncut), 1))
    driver.plans.clear()
    driver.finish(*whole)
    rows = [sum(row.length for row in plan.rows if row.length > 1 and not row.draft) for plan in driver.plans]
    assert all(tokens % uncut == 0 for tokens in rows)  # whole, as the client sees them
    # No step may be given to the device before such a one has ended, or prompts wait as long as others decode.
    assert all(plan.skipped for plan, tokens in zip(driver.plans, rows, strict=True) if not tokens)
    if other == "many":
        assert all(sum(pair) <= uncut for pair in pairwise(rows))
    else:
        assert len(rows) <= len(whole)
    driver.finish(one)


def open_busy(driver: BreakDriver) -> SessionId:
    """A session of the tenant `busy` that does all in each of its rows that a step has room for."""
    session = driver.open("busy")
    driver.arm_all(session)
    return session


def test_a_prompt_that_finds_no_room_for_its_breakpoints_takes_no_tokens_from_another_tenant(
    tiny_llama: TinyModel,
) -> None:
    driver, length = BreakDriver(tiny_llama.engine(max_step_tokens=STEP_TOKENS)), 60
    decoding = [driver.begin(open_busy(driver), prompt(number, 2), 100) for number in range(8)]
    while not all(turn.tokens for turn in decoding):
        driver.take(driver.engine.step())
    for number in range(2):
        driver.begin(open_busy(driver), prompt(50 + number, length), 1)
    plain = driver.submit(driver.open("plain"), prompt(99, length), 1)
    # Half of the steps could be the other tenant's.
    assert driver.steps_until_token(plain) <= 2 * ceil(length / (STEP_TOKENS - 1)) + 2
    assert all(len(turn.tokens) < 100 for turn in decoding)
