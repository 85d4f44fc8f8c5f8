"""Sessions whose KV leaves the device and comes back: the tokens are those of sessions that never left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from app.domain.values import KVPolicy, Phase, Tier
from app.messages import FreeHost, SetPhase
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import Driver
from tests.gpu.oracle import greedy_tokens as expected
from tests.gpu.tiny_engine import BLOCK, make_engine, model, oracle, prompt

__all__ = ["model", "oracle"]


@pytest.fixture(scope="module", params=["auto", "float8"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def driver(model: ResolvedModel, kv_dtype: str) -> Driver:
    return Driver(make_engine(model, kv_dtype=kv_dtype, host_blocks=200, policy=KVPolicy.SIGNAL))


def test_io_wait_frees_the_device_and_ready_brings_everything_back(driver: Driver, oracle: Any) -> None:
    session, start = driver.open(), prompt(1, 30)
    first = driver.answer(session, start, 5)
    driver.do(SetPhase(driver.ticket(), session, Phase.IO_WAIT))
    assert driver.place(session).tier is Tier.TO_HOST
    driver.move()
    found = driver.place(session)
    assert (found.tier, found.device_bytes) == (Tier.HOST, 0)
    assert driver.memory().kv_owned_bytes == 0
    driver.signal(session, Phase.READY)
    assert driver.place(session).tier is Tier.DEVICE
    turn = driver.answer(session, [7], 6)
    assert driver.tokens(turn) == expected(oracle, [*start, *driver.tokens(first), 7], 6)
    assert driver.end(turn).usage.tokens_recomputed == 0
    driver.signal(session, Phase.IO_WAIT)
    assert 0 < driver.place(session).bytes_out - found.bytes_out < found.bytes_out, "only what is new"


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
                driver.do(SetPhase(driver.ticket(), session, chance.choice(list(Phase))))
                if chance.random() < 0.7:
                    driver.move()
    assert (recomputed == 0) == (policy is not KVPolicy.NONE)


def test_a_turn_that_comes_during_the_move_turns_it_round(driver: Driver, oracle: Any) -> None:
    session, start = driver.open(), prompt(1, 30)
    first = driver.answer(session, start, 5)
    driver.placement.write_behind([])
    driver.do(SetPhase(driver.ticket(), session, Phase.IO_WAIT))
    turn = driver.answer(session, [7], 6)
    assert driver.tokens(turn) == expected(oracle, [*start, *driver.tokens(first), 7], 6)
    assert driver.memory().counts.turned_round == 1


def test_a_prefix_that_has_left_the_device_is_copied_and_not_computed(driver: Driver, oracle: Any) -> None:
    first, shared = driver.open(), prompt(1, 5 * BLOCK + 3)
    driver.answer(first, shared, 2)
    driver.signal(first, Phase.IO_WAIT)
    pool = driver.scheduler.cache.pool
    pool.release(pool.allocate(pool.available))  # nothing of it is left on the device
    second = driver.answer(driver.open(), shared[: 4 * BLOCK + 1], 6)
    assert driver.tokens(second) == expected(oracle, shared[: 4 * BLOCK + 1], 6)
    assert driver.end(second).usage.cached_tokens == 4 * BLOCK


@pytest.mark.parametrize("has_disk", [True, False])
def test_kv_that_must_leave_the_host_goes_to_disk_or_is_lost(
    model: ResolvedModel, oracle: Any, tmp_path: Path, has_disk: bool, kv_dtype: str
) -> None:
    kv_dir = tmp_path if has_disk else None
    driver = Driver(make_engine(model, kv_dtype=kv_dtype, host_blocks=200, policy=KVPolicy.SIGNAL, kv_dir=kv_dir))
    session, start = driver.open(), prompt(1, 30)
    first = driver.answer(session, start, 5)
    driver.signal(session, Phase.IO_WAIT)
    assert driver.place(session).host_bytes > 0
    driver.do(FreeHost(driver.ticket(), session))
    driver.move()
    left = driver.place(session)
    assert left.host_bytes == 0
    assert (left.disk_bytes > 0) == has_disk
    second = driver.answer(session, prompt(2, 3), 5)
    history = start + driver.tokens(first) + prompt(2, 3)
    assert driver.tokens(second) == expected(oracle, history, 5)


def test_copies_of_kv_on_the_device_leave_the_host_and_nothing_is_computed_again(driver: Driver) -> None:
    session = driver.open()
    driver.answer(session, prompt(1, 30), 5)
    driver.signal(session, Phase.IO_WAIT)
    driver.signal(session, Phase.READY)
    assert driver.place(session).host_bytes > 0
    driver.do(FreeHost(driver.ticket(), session))
    assert driver.place(session).host_bytes == 0
    again = driver.answer(session, prompt(2, 3), 1)
    assert driver.end(again).usage.cached_tokens >= 30


def test_kv_of_a_running_turn_follows_from_its_tokens_and_is_not_told_at_each(model: ResolvedModel) -> None:
    driver = Driver(make_engine(model, max_draft_tokens=0))  # a step adds one token, however fast the machine is
    session = driver.open()
    turn = driver.submit(session, prompt(1, 40), 30)
    sequence, sizes, told = driver.sequence(session), [], 0
    while not driver.ended(turn):
        driver.take(driver.engine.step())
        placed = driver.handler.placed()
        driver.take(placed)
        told += len(placed)
        sizes.append(driver.places[session].grown(len(sequence.tokens)).device_bytes)
        assert sizes[-1] == len(sequence.blocks) * driver.placement.tiers.block_bytes
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3 + 8, "three parts of the prompt, then a block for four tokens at a time"
    assert told < 6, "parts of the prompt and the end are told, decoded tokens are not"
