"""Sessions whose KV leaves the device and comes back: the tokens are those of sessions that never left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from app.domain.memory_map import SessionMemory
from app.domain.values import KVPolicy, Phase, SessionId, Tier
from app.gpu.engine import Engine
from app.messages import Close, Fork, FreeHost, Rewind, SetPhase
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import Driver
from tests.gpu.oracle import greedy_tokens as expected
from tests.gpu.tiny_engine import BLOCK, make_engine, model, oracle, prompt

__all__ = ["model", "oracle"]


@pytest.fixture(scope="module", params=["auto", "bfloat16", "float16", "float8"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def signal(driver: Driver, session: SessionId, phase: Phase, resume_in_ms: float | None = None) -> None:
    driver.do(SetPhase(driver.ticket(), session, phase, resume_in_ms))


def inspect(driver: Driver, session: SessionId) -> SessionMemory:
    driver.take(driver.engine._handler.placed())
    return driver.places[session]


@pytest.fixture
def tiered(model: ResolvedModel, kv_dtype: str) -> Engine:
    return make_engine(model, kv_dtype=kv_dtype, host_blocks=200, policy=KVPolicy.SIGNAL)


def test_io_wait_frees_the_device_and_ready_brings_everything_back(tiered: Engine, oracle: Any) -> None:
    driver = Driver(tiered)
    session, start = driver.open(), prompt(1, 30)
    first = driver.submit(session, start, 5)
    driver.finish(first)
    signal(driver, session, Phase.IO_WAIT)
    assert inspect(driver, session).tier is Tier.TO_HOST
    driver.move()
    found = inspect(driver, session)
    assert (found.tier, found.device_bytes) == (Tier.HOST, 0)
    assert driver.memory().kv_owned_bytes == 0
    signal(driver, session, Phase.READY)
    driver.move()
    assert inspect(driver, session).tier is Tier.DEVICE
    turn = driver.submit(session, [7], 6)
    driver.finish(turn)
    assert driver.tokens(turn) == expected(oracle, [*start, *driver.tokens(first), 7], 6)
    assert driver.end(turn).usage.tokens_recomputed == 0


@pytest.mark.parametrize("policy", list(KVPolicy))
def test_four_times_as_many_sessions_as_fit_say_what_they_would_say_alone(
    model: ResolvedModel, oracle: Any, policy: KVPolicy, kv_dtype: str
) -> None:
    driver = Driver(make_engine(model, kv_dtype=kv_dtype, blocks=30, host_blocks=200, policy=policy))
    chance = random.Random(3)
    sessions = [driver.open() for _ in range(12)]
    histories = {session: prompt(seed, 28) for seed, session in enumerate(sessions)}
    recomputed = 0
    for turn_number in range(3):
        chance.shuffle(sessions)
        for start in range(0, len(sessions), 3):
            group = sessions[start : start + 3]
            new = {s: histories[s] if turn_number == 0 else [turn_number] for s in group}
            turns = {s: driver.submit(s, new[s], 4) for s in group}
            driver.finish(*turns.values())
            for session, turn in turns.items():
                history = histories[session] if turn_number == 0 else [*histories[session], turn_number]
                assert driver.tokens(turn) == expected(oracle, history, 4)
                histories[session] = [*history, *driver.tokens(turn)]
                recomputed += driver.end(turn).usage.tokens_recomputed
                signal(driver, session, chance.choice([Phase.IO_WAIT, Phase.IDLE, Phase.READY, Phase.COMPUTE]))
                if chance.random() < 0.7:
                    driver.move()
    assert (recomputed == 0) == (policy is not KVPolicy.NONE)


def test_a_second_park_moves_only_what_is_new(tiered: Engine) -> None:
    driver = Driver(tiered)
    session = driver.open()
    driver.finish(driver.submit(session, prompt(1, 100), 1))
    signal(driver, session, Phase.IO_WAIT)
    driver.move()
    before = inspect(driver, session).bytes_out
    driver.finish(driver.submit(session, [1, 2], BLOCK))
    signal(driver, session, Phase.IO_WAIT)
    driver.move()
    assert 0 < inspect(driver, session).bytes_out - before < before / 10


def test_a_turn_that_comes_during_the_move_turns_it_round(tiered: Engine, oracle: Any) -> None:
    driver = Driver(tiered)
    session, start = driver.open(), prompt(1, 30)
    first = driver.submit(session, start, 5)
    driver.finish(first)
    driver.placement.write_behind([])
    signal(driver, session, Phase.IO_WAIT)
    turn = driver.submit(session, [7], 6)
    driver.finish(turn)
    assert driver.tokens(turn) == expected(oracle, [*start, *driver.tokens(first), 7], 6)
    assert driver.memory().counts.turned_round == 1


def test_forks_and_rewinds_of_a_session_on_the_host(tiered: Engine, oracle: Any) -> None:
    driver = Driver(tiered)
    session, start = driver.open(), prompt(1, 30)
    first = driver.submit(session, start, 5)
    driver.finish(first)
    signal(driver, session, Phase.IO_WAIT)
    driver.move()
    child = driver.open()
    driver.do(Close(driver.ticket(), child))
    driver.do(Fork(driver.ticket(), session, child))
    driver.do(Rewind(driver.ticket(), session, 22))
    turns = driver.submit(session, [7], 6), driver.submit(child, [8], 6)
    driver.finish(*turns)
    assert driver.tokens(turns[0]) == expected(oracle, [*start[:22], 7], 6)
    assert driver.tokens(turns[1]) == expected(oracle, [*start, *driver.tokens(first), 8], 6)
    assert sum(driver.end(turn).usage.tokens_recomputed for turn in turns) == 0


def test_a_prefix_that_has_left_the_device_is_copied_and_not_computed(tiered: Engine, oracle: Any) -> None:
    driver = Driver(tiered)
    first, shared = driver.open(), prompt(1, 5 * BLOCK + 3)
    driver.finish(driver.submit(first, shared, 2))
    signal(driver, first, Phase.IO_WAIT)
    driver.move()
    pool = tiered._scheduler.cache.pool
    pool.release(pool.allocate(pool.available))  # nothing of it is left on the device
    second = driver.submit(driver.open(), shared[: 4 * BLOCK + 1], 6)
    driver.finish(second)
    assert driver.tokens(second) == expected(oracle, shared[: 4 * BLOCK + 1], 6)
    assert driver.end(second).usage.cached_tokens == 4 * BLOCK


@pytest.mark.parametrize("has_disk", [True, False])
def test_kv_that_must_leave_the_host_goes_to_disk_or_is_lost(
    model: ResolvedModel, oracle: Any, tmp_path: Path, has_disk: bool, kv_dtype: str
) -> None:
    kv_dir = tmp_path if has_disk else None
    driver = Driver(make_engine(model, kv_dtype=kv_dtype, host_blocks=200, policy=KVPolicy.SIGNAL, kv_dir=kv_dir))
    session, start = driver.open(), prompt(1, 30)
    first = driver.submit(session, start, 5)
    driver.finish(first)
    signal(driver, session, Phase.IO_WAIT)
    driver.move()
    assert inspect(driver, session).host_bytes > 0
    driver.do(FreeHost(driver.ticket(), session))
    driver.move()
    left = inspect(driver, session)
    assert left.host_bytes == 0
    assert (left.disk_bytes > 0) == has_disk
    second = driver.submit(session, prompt(2, 3), 5)
    driver.finish(second)
    history = start + driver.tokens(first) + prompt(2, 3)
    assert driver.tokens(second) == expected(oracle, history, 5)


def test_copies_of_kv_on_the_device_leave_the_host_and_nothing_is_computed_again(tiered: Engine) -> None:
    driver = Driver(tiered)
    session = driver.open()
    driver.finish(driver.submit(session, prompt(1, 30), 5))
    signal(driver, session, Phase.IO_WAIT)
    driver.move()
    signal(driver, session, Phase.READY)
    driver.move()
    assert inspect(driver, session).host_bytes > 0
    driver.do(FreeHost(driver.ticket(), session))
    assert inspect(driver, session).host_bytes == 0
    again = driver.submit(session, prompt(2, 3), 1)
    driver.finish(again)
    assert driver.end(again).usage.cached_tokens >= 30
