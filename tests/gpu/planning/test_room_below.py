"""Room below the device, of several tenants: whose KV goes to disk, and how soon a turn comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.domain.values import KVPolicy, SessionId, Tier
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import Driver
from tests.gpu.tiny_engine import BLOCK, make_engine, model, prompt

__all__ = ["model"]
pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS, HOST_BLOCKS, STEP_TOKENS = 60, 120, 64
LENGTH, ANSWER = 20 * BLOCK, 4
RUNNING, GROWTH = 8, 40 * BLOCK


@pytest.fixture
def driver(model: ResolvedModel, tmp_path: Path) -> Driver:
    engine = make_engine(model, BLOCKS, STEP_TOKENS, HOST_BLOCKS, KVPolicy.SIGNAL, tmp_path, max_draft_tokens=0)
    return Driver(engine)


def take_step(driver: Driver) -> None:
    driver.take(driver.engine.step())
    driver.move()


def tier_of(driver: Driver, session: SessionId) -> Tier | None:
    return driver.engine._handler._sessions.find(session).tier


def open_idle(driver: Driver, tenant: str, number: int) -> SessionId:
    """A session that has had a turn."""
    session = driver.open(tenant)
    driver.finish(driver.submit(session, prompt(number, LENGTH), ANSWER))
    return session


def test_kv_of_the_tenant_that_holds_the_most_leaves_the_host_first(driver: Driver) -> None:
    quiet = open_idle(driver, "quiet", 99)
    greedy = [open_idle(driver, "greedy", number) for number in range(12)]
    assert Tier.DISK in [tier_of(driver, session) for session in greedy]
    assert tier_of(driver, quiet) is Tier.HOST


def test_turns_that_give_way_to_another_tenants_do_so_together(driver: Driver) -> None:
    """The host is full: each of them has to wait for the disk."""
    quiet = open_idle(driver, "quiet", 99)
    for number in range(12):
        open_idle(driver, "greedy", number)
    for number in range(RUNNING):
        driver.submit(driver.open("greedy"), prompt(100 + number, BLOCK), GROWTH)
    queue = driver.engine._scheduler.queue
    while all(len(active.sequence.blocks) < 6 for active in queue.running.values()):
        take_step(driver)
    turn, steps = driver.submit(quiet, prompt(50, BLOCK), ANSWER), 0
    while not driver.tokens(turn):
        take_step(driver)
        steps += 1
    assert steps <= 4  # KV of others goes to disk, theirs leaves the device, the other's comes back, and it runs
