"""Pauses and edits in the real model: its tokens are Transformers' own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.domain.breakpoints import Action, Edit, EditOp
from app.gpu.engine import Engine
from app.gpu.startup.loader import load_engine
from app.model_store.resolve import resolve
from app.settings import Settings
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import FULL
from tests.gpu.breakpoints.breaking_oracle import change_of, greedy
from tests.gpu.models.test_smollm2 import folder, prompts
from tests.gpu.oracle import greedy_tokens

__all__ = ["folder", "prompts"]

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600 if FULL else 300)]
LAYERS = (8, 16, 24)
COUNT = 64 if FULL else 16
ALONE = 10 if FULL else 3
SCALED = 10 if FULL else 4
SCALE = Edit(EditOp.SCALE, factor=0.9)


@dataclass(frozen=True)
class Expected:
    """Transformers' tokens for each prompt, as it is and with `SCALE` after layer 6.

    All made before the engine is: its kernels' threads and PyTorch's would wait for each other.
    """

    plain: list[list[int]]
    scaled: list[list[int]]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> Expected:
    oracle: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = [greedy_tokens(oracle, tokens, COUNT) for tokens in prompts]
    return Expected(plain, [greedy(oracle, tokens, COUNT, [change_of(6, SCALE)]) for tokens in prompts[:SCALED]])


@pytest.fixture(scope="module")
def engine(expected: Expected) -> Engine:
    settings = Settings(kv_device="256MiB", kv_host="256MiB", dtype="float32", device="cpu")
    return load_engine(resolve(settings.model, cache_dir=settings.cache_dir.expanduser()), settings.engine())


@pytest.fixture(scope="module")
def driver(engine: Engine) -> BreakDriver:
    return BreakDriver(engine)


def test_pausing_at_every_pass_alone_and_in_a_batch(
    driver: BreakDriver, prompts: list[list[int]], expected: Expected
) -> None:
    for tokens, wanted in list(zip(prompts, expected.plain, strict=True))[:ALONE]:
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
    assert [turn.tokens for turn in turns] == expected.plain


def test_scaling_by_nine_tenths_after_layer_6_changes_the_answer(
    driver: BreakDriver, prompts: list[list[int]], expected: Expected
) -> None:
    found = []
    for tokens in prompts[:SCALED]:
        session = driver.open()
        driver.arm(session, 6, action=Action.EDIT, edits=(SCALE,))
        turn = driver.begin(session, tokens, COUNT)
        driver.settle(turn)
        found.append(turn.tokens)
    assert found == expected.scaled
    assert found != expected.plain[:SCALED]
