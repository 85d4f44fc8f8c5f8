"""Medians, the choice of the better data type, and paired ratios, on rounds made by hand."""

import pytest

from benchmarks.peers.rounds import Measurement, Round
from benchmarks.peers.summary import Best, Metric, best_by_peer, metrics_of, times_better
from benchmarks.peers.timeline import DecodePhase
from loadgen.results.spread import Spread

THROUGHPUT = Metric("throughput_8", "Throughput, 8 streams", "tok/s", True)
TTFT = Metric("ttft_1000", "First token of 1,000", "s", False)


def make_round(number: int, peer: str, dtype: str, throughput: float, ttft_s: list[float]) -> Round:
    phase = DecodePhase(8, 512, 512 / throughput, throughput, 2 * throughput, [0.1] * 8)
    return Round(number, peer, dtype, None, Measurement([phase], ttft_s, 0.0, 0.0))


ROUNDS = [
    make_round(0, "djinn", "float32", 200.0, [1.0]),
    make_round(1, "djinn", "float32", 300.0, [2.0]),
    make_round(0, "vllm", "float32", 100.0, [2.0]),
    make_round(1, "vllm", "float32", 100.0, [2.0]),
    make_round(0, "vllm", "bfloat16", 50.0, [0.5]),
    make_round(1, "vllm", "bfloat16", 150.0, [0.5]),
    make_round(2, "vllm", "bfloat16", 160.0, [0.5]),
]


def test_time_to_first_token_is_the_median_over_the_prompts() -> None:
    assert metrics_of(make_round(0, "vllm", "float32", 1.0, [9.0, 1.0, 2.0]).measurement)[TTFT] == 2.0


def test_a_peer_stands_with_its_better_data_type_by_the_median_of_its_rounds() -> None:
    best = best_by_peer(ROUNDS, THROUGHPUT)

    assert best["vllm"] == Best("bfloat16", Spread(150.0, 50.0, 160.0, 3))
    assert best["djinn"] == Best("float32", Spread(250.0, 200.0, 300.0, 2))


def test_a_shorter_time_is_better() -> None:
    assert best_by_peer(ROUNDS, TTFT)["vllm"].dtype == "bfloat16"


def test_ratios_pair_each_round_with_itself() -> None:
    # Round 0: 200 / 50; round 1: 300 / 150; round 2 has no partner.
    assert times_better(ROUNDS, THROUGHPUT, "djinn", "vllm") == Spread(3.0, 2.0, 4.0, 2)


def test_a_ratio_of_times_is_above_one_for_the_faster() -> None:
    # Round 0: 0.5 s against 1.0 s; round 1: 0.5 s against 2.0 s.
    assert times_better(ROUNDS, TTFT, "djinn", "vllm") == Spread(0.375, 0.25, 0.5, 2)


def test_an_absent_peer_has_no_ratio() -> None:
    with pytest.raises(KeyError):
        times_better(ROUNDS, TTFT, "djinn", "transformers")
