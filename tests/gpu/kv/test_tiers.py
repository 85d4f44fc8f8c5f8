"""Sessions whose KV leaves the device and comes back: the tokens are those of sessions that never left."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.domain.values import KVPolicy, Phase, Tier
from app.gpu.kv.file import write_kv_file
from app.gpu.state.kv_header import KVFileHeader, KVIdentity
from app.messages import FreeHost, SetPhase
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import Driver
from tests.gpu.tiny_engine import BLOCK, make_engine, model, oracle, prompt
from tests.gpu.tiny_engine import greedy_tokens as expected

__all__ = ["model", "oracle"]


@pytest.fixture(scope="module", params=["auto", "float8"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def driver(model: ResolvedModel, kv_dtype: str) -> Driver:
    return Driver(make_engine(model, kv_dtype=kv_dtype, host_blocks=200, policy=KVPolicy.SIGNAL))


@pytest.fixture
def disk_driver(model: ResolvedModel, tmp_path: Path) -> Driver:
    return Driver(make_engine(model, host_blocks=50, policy=KVPolicy.SIGNAL, kv_dir=tmp_path))


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


def flip_a_bit(path: Path, _: KVIdentity) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def put_another_models_there(path: Path, identity: KVIdentity) -> None:
    blocks = [memoryview(bytes(identity.layout.block_bytes))] * 2
    write_kv_file(path, KVFileHeader(replace(identity, fingerprint="another model"), [0] * 8, 8), blocks)


@pytest.mark.parametrize("damage", [flip_a_bit, lambda path, _: path.unlink(), put_another_models_there])
def test_a_file_that_cannot_be_read_is_recomputed(
    disk_driver: Driver, oracle: Any, tmp_path: Path, damage: Callable[[Path, KVIdentity], None]
) -> None:
    """The failure is counted."""
    driver = disk_driver
    session, start = driver.open(), prompt(1, 30)
    first = driver.answer(session, start, 5)
    driver.signal(session, Phase.IDLE)
    assert driver.memory().sessions_by_tier == {Tier.DISK: 1}
    driver.generate(prompt(2, 600), 1)  # nothing of the session is left in the prefix cache
    [path] = tmp_path.iterdir()
    damage(path, driver.mover.identity)
    turn = driver.answer(session, [7], 6)
    assert driver.tokens(turn) == expected(oracle, [*start, *driver.tokens(first), 7], 6)
    assert driver.end(turn).usage.tokens_recomputed > 0
    assert driver.memory().counts.disk_failures == 1


def test_a_file_that_cannot_be_written_leaves_the_session_on_the_host(disk_driver: Driver, tmp_path: Path) -> None:
    driver = disk_driver
    session = driver.open()
    driver.answer(session, prompt(1, 30), 5)
    (tmp_path / f"{session}.safetensors").mkdir()  # nothing can be renamed to this
    driver.signal(session, Phase.IDLE)
    assert driver.memory().sessions_by_tier == {Tier.HOST: 1}
    assert driver.memory().counts.disk_failures == 1
    assert driver.end(driver.answer(session, [7], 6)).usage.tokens_recomputed == 0
