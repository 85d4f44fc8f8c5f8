"""The comparison of two load generators: the load, its checks, the rounds, the verdict."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import pytest

from benchmarks.generators.comparison import Round, compare
from benchmarks.generators.generator import Endpoint
from benchmarks.generators.guidellm import read_report
from benchmarks.generators.load import Load
from benchmarks.generators.measured import Measured, OtherLoadError, check_load
from benchmarks.generators.rounds import RoundRunner

LOAD = Load("steady", requests=5, rate=2.0, prompt_tokens=100, completion_tokens=10)
RIGHT = Measured(5, 500, 50, 0, ttft_p50_s=0.1, ttft_mean_s=0.2, tokens_per_s=20, latest_s=0.01)


@dataclass
class Scripted:
    """A generator that is always right, and notes the seeds that it was given."""

    name: str
    order: list[tuple[str, int]]

    def run(self, endpoint: Endpoint, load: Load, seed: int) -> Measured:
        self.order.append((self.name, seed))
        return RIGHT


def a_round(number: int, own_ttft_s: float) -> Round:
    """In which the rival has 1 s."""
    own, rival = replace(RIGHT, ttft_p50_s=own_ttft_s), replace(RIGHT, ttft_p50_s=1.0)
    return Round(number, "steady", seed=number, first="a", own=own, rival=rival, other_cpu_share=0.0)


@pytest.mark.parametrize(
    ("measured", "fault"),
    [
        (replace(RIGHT, requests=4, prompt_tokens=400, completion_tokens=40), "4 of 5 requests completed"),
        (replace(RIGHT, completion_tokens=49), "49 completion tokens in 5 requests"),
        (replace(RIGHT, cached_tokens=64), "64 prompt tokens came from the prefix cache"),
    ],
)
def test_another_load_is_not_compared(measured: Measured, fault: str) -> None:
    with pytest.raises(OtherLoadError, match=f"rival, steady: {fault}"):
        check_load("rival", LOAD, measured)


def test_generators_agree_within_a_tenth_of_the_median_ratio() -> None:
    [median, mean, rate] = compare([a_round(0, 1.09), a_round(1, 5.0), a_round(2, 1.0)])
    assert median.ratio.median == pytest.approx(1.09)
    assert (median.ratio.low, median.ratio.high) == (1.0, 5.0)
    assert all(comparison.agrees for comparison in (median, mean, rate))


def test_generators_take_turns_at_going_first_and_no_seed_comes_twice() -> None:
    order: list[tuple[str, int]] = []
    generators = Scripted("a", order), Scripted("b", order)
    measuring = RoundRunner(
        Endpoint("http://127.0.0.1:1", "model", Path("model")), generators, os.getsid(0), [0], print
    )
    rounds = [measuring.run(number, LOAD) for number in range(2)]
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert [entry.first for entry in rounds] == ["a", "b"]


def test_guidellm_reports_milliseconds() -> None:
    def figure(**values: float) -> dict[str, dict[str, float]]:
        return {"successful": {"mean": 0.0, "median": 0.0, "total_sum": 0.0, **values}}

    metrics = {
        "request_totals": {"successful": 2, "errored": 0},
        "time_to_first_token_ms": figure(mean=150.0, median=100.0),
        "output_tokens_per_second": figure(mean=31.5),
        "prompt_token_count": figure(total_sum=128.0),
        "output_token_count": figure(total_sum=32.0),
        "root_dispatch_delay": {"max": 0.4},
    }
    requests = {"successful": [{"cached_tokens": 16}, {"cached_tokens": None}]}
    found = read_report(orjson.dumps({"benchmarks": [{"metrics": metrics, "requests": requests}]}))
    assert found == Measured(2, 128, 32, 16, ttft_p50_s=0.1, ttft_mean_s=0.15, tokens_per_s=31.5, latest_s=0.4)
