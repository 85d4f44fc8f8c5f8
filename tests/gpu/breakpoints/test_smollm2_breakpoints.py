"""Pauses and edits in the real model: its tokens are Transformers' own."""

from __future__ import annotations

import random
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
from tests.gpu.breakpoints.breaking_oracle import change_of, hooked
from tests.gpu.models.test_smollm2 import folder, prompts
from tests.gpu.oracle import greedy_after

__all__ = ["folder", "prompts"]

pytestmark = [pytest.mark.long, pytest.mark.model, pytest.mark.timeout(3600 if FULL else 300)]
LAYERS = (8, 16, 24)
COUNT = 64 if FULL else 16
ALONE = 10 if FULL else 3
SCALED = 10 if FULL else 4
SCALE = Edit(EditOp.SCALE, factor=0.9)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine() -> Engine:
    settings = Settings(kv_device="256MiB", kv_host="256MiB", dtype="float32", device="cpu")
    return load_engine(resolve(settings.model, cache_dir=settings.cache_dir.expanduser()), settings.engine())


@pytest.fixture(scope="module")
def driver(engine: Engine) -> BreakDriver:
    return BreakDriver(engine)


def test_pausing_at_every_pass_alone_and_in_a_batch(driver: BreakDriver, prompts: list[list[int]], oracle: Any) -> None:
    alone = []
    for tokens in prompts[:ALONE]:
        session = driver.open()
        driver.arm(session, *LAYERS)
        turn = driver.begin(session, tokens, COUNT)
        assert len(driver.run(turn)) == len(LAYERS) * COUNT
        assert turn.tokens == greedy_after(oracle, tokens, turn.tokens)
        alone.append(turn.tokens)
        driver.close(session)

    turns = []
    for number, tokens in enumerate(prompts):
        session = driver.open()
        if number % 3:
            driver.arm(session, *(LAYERS if number % 2 else LAYERS[1:2]))
        turns.append(driver.begin(session, tokens, COUNT))
    driver.run_together(turns, random.Random(2))
    found = [turn.tokens for turn in turns]
    assert [len(tokens) for tokens in found] == [COUNT] * len(prompts)
    assert found == [greedy_after(oracle, prompt, tokens) for prompt, tokens in zip(prompts, found, strict=True)]
    assert alone == found[:ALONE]


def test_scaling_by_nine_tenths_after_layer_6_changes_the_answer(
    driver: BreakDriver, prompts: list[list[int]], oracle: Any
) -> None:
    plain, scaled, found = [], [], []
    for tokens in prompts[:SCALED]:
        session = driver.open()
        driver.arm(session, 6, action=Action.EDIT, edits=(SCALE,))
        turn = driver.begin(session, tokens, COUNT)
        driver.settle(turn)
        assert len(turn.tokens) == COUNT
        found.append(turn.tokens)
        plain.append(greedy_after(oracle, tokens, turn.tokens))
        with hooked(oracle, [change_of(6, SCALE)]):
            scaled.append(greedy_after(oracle, tokens, turn.tokens))
    assert found == scaled
    assert found != plain
