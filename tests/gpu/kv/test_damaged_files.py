"""Files of the disk tier that cannot be used: the tokens are right all the same, and the failure is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.domain.values import KVPolicy, Phase, Tier
from app.gpu.kv.file import write_kv_file
from app.gpu.kv.header import KVFileHeader, KVIdentity
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import Driver
from tests.gpu.oracle import greedy_tokens as expected
from tests.gpu.tiny_engine import make_engine, model, oracle, prompt

__all__ = ["model", "oracle"]


def truncate(path: Path, _: KVIdentity) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path, _: KVIdentity) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def delete(path: Path, _: KVIdentity) -> None:
    path.unlink()


def put_another_models_there(path: Path, identity: KVIdentity) -> None:
    put_there(path, replace(identity, fingerprint="another model"))


def put_another_type_there(path: Path, identity: KVIdentity) -> None:
    put_there(path, replace(identity, layout=replace(identity.layout, dtype="bfloat16")))


def put_there(path: Path, identity: KVIdentity) -> None:
    blocks = [memoryview(bytes(identity.layout.block_bytes))] * 2
    write_kv_file(path, KVFileHeader(identity, [0] * 8, 8), blocks)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, delete, put_another_models_there, put_another_type_there])
def test_a_file_that_cannot_be_read_is_computed_again(
    model: ResolvedModel, oracle: Any, tmp_path: Path, damage: Callable[[Path, KVIdentity], None]
) -> None:
    engine = make_engine(model, host_blocks=50, policy=KVPolicy.SIGNAL, kv_dir=tmp_path)
    driver, start = Driver(engine), prompt(1, 30)
    session = driver.open()
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


def test_a_file_that_cannot_be_written_leaves_the_session_on_the_host(
    model: ResolvedModel, oracle: Any, tmp_path: Path
) -> None:
    driver, start = Driver(make_engine(model, host_blocks=50, policy=KVPolicy.SIGNAL, kv_dir=tmp_path)), prompt(1, 30)
    session = driver.open()
    first = driver.answer(session, start, 5)
    (tmp_path / f"{session}.safetensors").mkdir()  # nothing can be renamed to this
    driver.signal(session, Phase.IDLE)
    assert driver.memory().sessions_by_tier == {Tier.HOST: 1}
    assert driver.memory().counts.disk_failures == 1
    turn = driver.answer(session, [7], 6)
    assert driver.tokens(turn) == expected(oracle, [*start, *driver.tokens(first), 7], 6)
    assert driver.end(turn).usage.tokens_recomputed == 0
