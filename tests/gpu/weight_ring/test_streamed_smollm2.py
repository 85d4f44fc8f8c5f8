"""A real model with room on the device for a sixth of its weights, against the same with room for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.domain.breakpoints import Action, When
from app.gpu.startup.loader import load_engine
from app.model_store.resolve import resolve
from app.settings import Settings
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_oracle import tensor_of

LAYERS = (0, 7, 15, 29)


def say(**changed: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens of two sessions that compute together, and the activations of one of them."""
    settings = Settings(kv_device=64 << 20, kv_host=64 << 20, state_dir=None, **changed)
    model = resolve(settings.model, cache_dir=Settings().cache_dir.expanduser())
    driver = BreakDriver(load_engine(model, settings.engine()))
    try:
        watched, other = driver.open(), driver.open()
        driver.arm(watched, *LAYERS, action=Action.CAPTURE, when=When())
        turns = [driver.begin(watched, range(1000, 1040), 12), driver.begin(other, range(2000, 2009), 6)]
        driver.settle(*turns)
        hidden = [tensor_of(record.tensor) for record in driver.captures(watched).records]
        return [turn.tokens for turn in turns], hidden
    finally:
        driver.engine.close()


@pytest.mark.long
@pytest.mark.model
def test_tokens_and_activations_are_the_same(tmp_path: Path) -> None:
    tokens, hidden = say()
    streamed_tokens, streamed_hidden = say(weights_device=90_000_000, cache_dir=tmp_path)
    assert streamed_tokens == tokens
    assert len(hidden) >= 12 * len(LAYERS)
    assert all(map(torch.equal, streamed_hidden, hidden))
