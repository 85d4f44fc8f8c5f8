"""Which tenants' turns run and whose KV has the room where not all can: more gives way to less."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.domain.values import KVPolicy, Ticket, Tier
from app.gpu.planning.admission import SLICE_STEPS
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import Driver
from tests.gpu.tiny_engine import BLOCK, driver, greedy_tokens, make_engine, model, oracle, prompt

__all__ = ["driver", "model", "oracle"]
pytestmark = pytest.mark.usefixtures("one_thread")

MAX_RUNNING = 8
LENGTH, ANSWER = 16 * BLOCK, 30
BLOCKS = 4 * (LENGTH + ANSWER) // BLOCK
"""Room for four such turns, and not for both of `LONG` and `SHORT`."""
LONG, SHORT = 60 * BLOCK, 40 * BLOCK
STEP_TOKENS = 64
Make = Callable[..., Driver]


def tiered(model: ResolvedModel, step_tokens: int = 512) -> Driver:
    return Driver(make_engine(model, BLOCKS, step_tokens, host_blocks=8 * BLOCKS, policy=KVPolicy.SIGNAL))


def pooled(model: ResolvedModel, step_tokens: int = 512) -> Driver:
    return Driver(make_engine(model, BLOCKS, step_tokens))


with_or_without_host = pytest.mark.parametrize("make", [pooled, tiered])


def turns_of(driver: Driver, tenant: str, count: int, first: int, length: int = 3) -> list[Ticket]:
    return [driver.submit(driver.open(tenant), prompt(first + number, length), ANSWER) for number in range(count)]


def begin(driver: Driver, turns: list[Ticket], count: int) -> None:
    """Step until so many of the turns run."""
    while sum(bool(driver.tokens(turn)) for turn in turns) < count:
        driver.advance()


def running(driver: Driver) -> list[Ticket]:
    return [each.active_turn.ticket for each in driver.scheduler.queue.running.values()]


def test_a_tenant_that_fills_the_step_lets_another_in(driver: Driver) -> None:
    many = turns_of(driver, "many", 3 * MAX_RUNNING, 0)
    begin(driver, many, MAX_RUNNING)
    one = driver.submit(driver.open("one"), prompt(100, 3), 2)
    for _ in range(4):
        driver.advance()
    assert driver.ended(one)
    assert not any(driver.ended(turn) for turn in many)


def test_tenants_come_to_run_as_many_turns_as_each_other(model: ResolvedModel) -> None:
    """Without drafts, which depend on the clock: a turn that ends early gives its place to another."""
    driver = Driver(make_engine(model, max_draft_tokens=0))
    many = turns_of(driver, "many", MAX_RUNNING, 0)
    begin(driver, many, MAX_RUNNING)
    few = turns_of(driver, "few", MAX_RUNNING, 20)
    before = {turn: len(driver.tokens(turn)) for turn in (*many, *few)}
    for _ in range(30):
        driver.advance()
    gained = [sum(len(driver.tokens(turn)) > before[turn] + 15 for turn in turns) for turns in (many, few)]
    assert gained == [MAX_RUNNING // 2, MAX_RUNNING // 2]


def test_turns_of_one_tenant_take_nothing_from_each_other(driver: Driver) -> None:
    first = turns_of(driver, "many", MAX_RUNNING, 0)
    begin(driver, first, MAX_RUNNING)
    late = driver.submit(driver.open("many"), prompt(100, 3), 2)
    while not any(map(driver.ended, first)):
        driver.advance()
        assert not driver.tokens(late)


def test_a_tenant_with_many_turns_does_not_make_the_steps_of_another_long(driver: Driver) -> None:
    """Each of the many has its place in some of the steps. Alone they have all rows."""
    driver.scheduler.fairness.rows = 2
    many = turns_of(driver, "many", MAX_RUNNING - 1, 0)
    begin(driver, many, MAX_RUNNING - 1)
    before = sum(len(driver.tokens(turn)) for turn in many)
    driver.advance()
    assert sum(len(driver.tokens(turn)) for turn in many) - before >= MAX_RUNNING - 1
    one = driver.submit(driver.open("one"), prompt(100, 3), ANSWER)
    begin(driver, [one], 1)
    had = {turn: len(driver.tokens(turn)) for turn in (*many, one)}
    steps = MAX_RUNNING
    for _ in range(steps):
        driver.advance()
    gained = {turn: len(driver.tokens(turn)) - count for turn, count in had.items()}
    assert gained[one] >= steps
    assert sum(gained[turn] for turn in many) <= 4 * steps  # two rows, and drafts
    assert min(gained[turn] for turn in many) >= steps * 2 // len(many) - 1


@with_or_without_host
def test_a_tenant_whose_kv_fills_the_device_lets_another_in(model: ResolvedModel, oracle: object, make: Make) -> None:
    driver = make(model)
    many = turns_of(driver, "many", 6, 0, LENGTH)
    begin(driver, many, 4)
    one = driver.submit(driver.open("one"), prompt(100, LENGTH), 2)
    for _ in range(8):
        driver.advance()
    assert driver.ended(one)
    assert not any(driver.ended(turn) for turn in many)
    driver.finish(*many)
    expected = [greedy_tokens(oracle, prompt(number, LENGTH), ANSWER) for number in range(6)]
    assert [driver.tokens(turn) for turn in many] == expected


def test_kv_that_is_guaranteed_stays(model: ResolvedModel) -> None:
    driver = tiered(model)
    sessions = [driver.open("many") for _ in range(4)]
    for session in sessions:
        driver.sequence(session).guaranteed = True
    many = [driver.submit(session, prompt(number, LENGTH), ANSWER) for number, session in enumerate(sessions)]
    begin(driver, many, 4)
    one = driver.submit(driver.open("one"), prompt(100, 2 * LENGTH), 2)
    while not any(map(driver.ended, many)):
        driver.advance()
        assert not driver.tokens(one)


@with_or_without_host
def test_turns_that_grow_do_not_push_out_another_tenants(model: ResolvedModel, make: Make) -> None:
    """The device has room for their contexts, and not for their answers."""
    driver = make(model)
    many = turns_of(driver, "many", MAX_RUNNING - 1, 0, LENGTH // 2)
    begin(driver, many, MAX_RUNNING - 1)
    one = driver.submit(driver.open("one"), prompt(100, 2 * BLOCK), ANSWER)
    steps = 0
    while not driver.ended(one):
        driver.advance()
        steps += 1
    assert steps <= ANSWER + 4
    assert driver.end(one).usage.tokens_recomputed == 0


def begun(driver: Driver, tenant: str, number: int, length: int, answer: int = ANSWER) -> Ticket:
    """A turn that has its first token."""
    turn = driver.submit(driver.open(tenant), prompt(number, length), answer)
    driver.steps_until_token(turn)
    return turn


@with_or_without_host
def test_a_turn_that_fills_the_device_gives_way_to_a_shorter_one(model: ResolvedModel, oracle: Any, make: Make) -> None:
    driver = make(model, STEP_TOKENS)
    long = begun(driver, "long", 0, LONG)
    short = driver.submit(driver.open("short"), prompt(1, SHORT), 2)
    steps = 0
    while not driver.ended(short):
        driver.advance()
        steps += 1
    assert not driver.ended(long)
    assert steps <= SLICE_STEPS + 2 * SHORT // (STEP_TOKENS // 4) + 4  # its prompt has each second step
    driver.finish(long)
    assert driver.tokens(long) == greedy_tokens(oracle, prompt(0, LONG), ANSWER)


@with_or_without_host
def test_short_turns_without_end_keep_no_longer_one_out(model: ResolvedModel, oracle: Any, make: Make) -> None:
    driver = make(model, STEP_TOKENS)
    long = driver.submit(driver.open("long"), prompt(0, LONG), ANSWER)
    short, steps, ended = list[Ticket](), 0, 0
    while not driver.ended(long):
        ended += sum(map(driver.ended, short))
        short = [turn for turn in short if not driver.ended(turn)]
        while len(short) < 2:
            short.append(driver.submit(driver.open("short"), prompt(steps + len(short), SHORT // 2), 4))
        driver.advance()
        steps += 1
        assert steps < 2000
    assert ended > 2
    assert driver.tokens(long) == greedy_tokens(oracle, prompt(0, LONG), ANSWER)


@pytest.mark.parametrize("tenant", ["long", "short"])
def test_the_only_turn_of_a_tenant_stays_for_one_that_has_a_turn_too(model: ResolvedModel, tenant: str) -> None:
    """And within a tenant nothing gives way."""
    driver = pooled(model, STEP_TOKENS)
    long, first = begun(driver, "long", 0, LONG), begun(driver, "short", 1, SHORT // 4, answer=60)
    second = driver.submit(driver.open(tenant), prompt(2, SHORT // 2), 2)
    while not driver.ended(long):
        driver.advance()
        assert not driver.tokens(second)
    assert driver.end(long).usage.tokens_recomputed == 0
    driver.finish(first, second)


def test_nobody_gives_way_in_vain(model: ResolvedModel) -> None:
    """Two turns share nearly all of their KV: the younger one's would make no room for another tenant's second turn."""
    driver = pooled(model, STEP_TOKENS)
    first = begun(driver, "long", 0, LONG)
    shared = [*prompt(0, LONG)[:-BLOCK], *prompt(5, BLOCK)]
    second = driver.submit(driver.open("long"), shared, ANSWER)
    own = driver.submit(driver.open("short"), prompt(1, 2 * BLOCK), ANSWER)
    begin(driver, [second, own], 2)
    other = driver.submit(driver.open("short"), prompt(2, SHORT), 2)
    while not driver.ended(first):
        driver.advance()
        assert second in running(driver) or driver.ended(second)
    driver.finish(second, own, other)


def test_kv_of_the_tenant_that_holds_the_most_leaves_the_host_first_and_the_device_together(
    model: ResolvedModel, tmp_path: Path
) -> None:
    driver = Driver(make_engine(model, 60, STEP_TOKENS, 120, KVPolicy.SIGNAL, tmp_path, max_draft_tokens=0))
    sessions = [driver.open("quiet"), *(driver.open("greedy") for _ in range(12))]
    for number, session in enumerate(sessions):
        driver.answer(session, prompt(number, 20 * BLOCK), 4)
    quiet, *greedy = sessions
    assert Tier.DISK in [driver.sequence(session).tier for session in greedy]
    assert driver.sequence(quiet).tier is Tier.HOST
    for number in range(MAX_RUNNING):
        driver.submit(driver.open("greedy"), prompt(100 + number, BLOCK), 40 * BLOCK)
    while all(len(each.blocks) < 6 for each in driver.scheduler.queue.running.values()):
        driver.advance()
    turn = driver.submit(quiet, prompt(50, BLOCK), 4)
    # KV of others goes to disk, theirs leaves the device, the other's comes back, and it runs.
    assert driver.steps_until_token(turn) <= 4
