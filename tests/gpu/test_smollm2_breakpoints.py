"""Pauses and edits in the real model: its tokens are Transformers' own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.breakpoints import Action, Edit, EditOp, Pass, When
from app.gpu.engine import Engine
from app.gpu.loader import load_engine
from app.model_store.resolve import resolve
from app.settings import Settings
from tests.gpu.breaking import BreakDriver
from tests.gpu.breaking_models import FULL
from tests.gpu.breaking_oracle import change_of, greedy
from tests.gpu.test_smollm2 import folder, prompts

__all__ = ["folder", "prompts"]

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600 if FULL else 300)]
LAYERS = (8, 16, 24)
COUNT = 64 if FULL else 8
ALONE = 10 if FULL else 1


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(oracle: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [greedy(oracle, tokens, COUNT) for tokens in prompts]


@pytest.fixture(scope="module")
def engine() -> Engine:
    settings = Settings(kv_device="256MiB", kv_host="256MiB", dtype="float32", device="cpu")
    return load_engine(resolve(settings.model, cache_dir=settings.cache_dir.expanduser()), settings.engine())


@pytest.fixture(scope="module")
def driver(engine: Engine) -> BreakDriver:
    return BreakDriver(engine)


def test_pausing_at_every_pass_alone_and_in_a_batch(
    driver: BreakDriver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    for tokens, wanted in list(zip(prompts, expected, strict=True))[:ALONE]:
        session = driver.open()
        driver.arm(session, *LAYERS)
        turn = driver.begin(session, tokens, COUNT)
        assert len(driver.run(turn)) == len(LAYERS) * COUNT
        assert turn.tokens == wanted
        driver.close(session)

    turns = []
    for number, tokens in enumerate(prompts):
        session = driver.open()
        if number % 3:
            driver.arm(session, *(LAYERS if number % 2 else LAYERS[1:2]))
        turns.append(driver.begin(session, tokens, COUNT))
    driver.run_together(turns, random.Random(2))
    assert [turn.tokens for turn in turns] == expected


def test_scaling_by_nine_tenths_after_layer_6_changes_the_answer(
    driver: BreakDriver, oracle: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    scale = Edit(EditOp.SCALE, factor=0.9)
    changed = []
    for tokens in prompts[:3]:
        session = driver.open()
        driver.arm(session, 6, action=Action.EDIT, edits=(scale,), when=When(Pass.ANY))
        turn = driver.begin(session, tokens, COUNT)
        driver.settle(turn)
        assert turn.tokens == greedy(oracle, tokens, COUNT, [change_of(6, scale)])
        changed.append(turn.tokens)
    assert changed != expected[:3]
