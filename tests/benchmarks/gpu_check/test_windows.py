"""Rates: how they are counted, and what they are held against."""

import math

import pytest

from app.domain.values import ModelInfo, SessionId
from benchmarks.engine.decoding import decode_rate
from benchmarks.engine.live import LiveTurn
from benchmarks.gpu_check.stages.decode import bytes_limit

# Llama 2 7B in bfloat16, from its published config: 6.74 billion parameters, 512 KiB of KV a token.
LLAMA_2_7B = ModelInfo(
    "llama-2-7b", 4096, 32_000, 32, 4096, 32, 128, "bfloat16", "cuda", 13_476_839_424, 524_288, "bfloat16"
)


def turn(*times: float) -> LiveTurn:
    return LiveTurn(SessionId("one"), 0.0, [1] * len(times), list(times))


def test_only_steps_that_all_sessions_take_part_in_are_counted() -> None:
    early, late = turn(1, 2, 3, 4, 5, 6), turn(3, 4, 5, 6, 7, 8)
    # From 5, when the later one has had three tokens, to 6, when the earlier one ends: one token of each.
    assert decode_rate([early, late]) == 2.0


def test_a_session_alone_is_counted_from_its_third_token() -> None:
    assert decode_rate([turn(0.0, 9.0, 10.0, 10.5, 11.0)]) == 2.0


def test_turns_that_never_decode_together_have_no_rate() -> None:
    assert math.isnan(decode_rate([turn(1, 2, 3, 4), turn(5, 6, 7, 8)]))


def test_the_bytes_limit_is_that_of_one_pass_over_weights_and_kv() -> None:
    # 13.48 GB less the 0.26 GB of the embedding, and 0.10 GB of KV at 200 tokens, at 3,350 GB/s.
    assert bytes_limit(LLAMA_2_7B, 1, 200, 3350.0) == pytest.approx(251.5, rel=0.002)
    assert bytes_limit(LLAMA_2_7B, 128, 200, 3350.0) == pytest.approx(128 * 3350e9 / (13.2147e9 + 13.4218e9), rel=0.002)
