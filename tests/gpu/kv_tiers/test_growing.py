"""KV of a turn that runs: who asks for it counts it from the tokens, so that the engine tells nothing at each."""

from __future__ import annotations

from app.domain.memory_map import SessionMemory
from app.domain.values import Tier
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import Driver
from tests.gpu.tiny_engine import make_engine, model, prompt

__all__ = ["model"]


def test_kv_of_a_running_turn_follows_from_its_tokens(model: ResolvedModel) -> None:
    driver = Driver(make_engine(model, max_draft_tokens=0))  # a step adds one token, however fast the machine is
    session = driver.open()
    turn = driver.submit(session, prompt(1, 40), 30)
    [sequence] = driver.engine._handler.sequences
    sizes, told = [], 0
    while not driver.ended(turn):
        driver.take(driver.engine.step())
        placed = driver.engine._handler.placed()
        driver.take(placed)
        told += len(placed)
        sizes.append(driver.places[session].grown(len(sequence.tokens)).device_bytes)
        assert sizes[-1] == driver.engine._handler._inspector.session(sequence).device_bytes
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3 + 8, "three parts of the prompt, then a block for four tokens at a time"
    assert told < 6, "parts of the prompt and the end are told, decoded tokens are not"


def test_kv_that_is_not_on_the_device_does_not_grow() -> None:
    away = SessionMemory(
        tokens=9, computed_tokens=8, tier=Tier.HOST, blocks=2, host_bytes=20, block_tokens=4, block_bytes=10
    )
    assert away.grown(100) is away


def test_kv_of_half_a_prompt_does_not_count_the_rest() -> None:
    half = SessionMemory(
        tokens=90, computed_tokens=8, tier=Tier.DEVICE, blocks=2, device_bytes=20, block_tokens=4, block_bytes=10
    )
    assert half.grown(90) is half
