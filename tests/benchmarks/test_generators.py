"""The comparison of two load generators: the load, its checks, the rounds, the verdict."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from benchmarks.generators.comparison import Round, compare
from benchmarks.generators.generator import Endpoint, Generator
from benchmarks.generators.guidellm import read_report
from benchmarks.generators.load import Load
from benchmarks.generators.measured import Measured, OtherLoadError, check_load
from benchmarks.generators.rounds import RoundRunner

LOAD = Load("steady", requests=5, rate=2.0, prompt_tokens=100, completion_tokens=10)
RIGHT = Measured(
    requests=5,
    prompt_tokens=500,
    completion_tokens=50,
    cached_tokens=0,
    ttft_p50_s=0.1,
    ttft_mean_s=0.2,
    tokens_per_s=20,
    latest_s=0.01,
)
ENDPOINT = Endpoint("http://127.0.0.1:1", "model", Path("model"))


class Scripted:
    """A generator that gives the answers that it was told, and notes the seeds that it was given."""

    def __init__(self, name: str, answers: Sequence[Measured], order: list[tuple[str, int]]) -> None:
        self.name = name
        self._answers = iter(answers)
        self._order = order

    def run(self, endpoint: Endpoint, load: Load, seed: int) -> Measured:
        self._order.append((self.name, seed))
        return next(self._answers)


def runner(own: Generator, rival: Generator, discarded: list[str]) -> RoundRunner:
    return RoundRunner(ENDPOINT, (own, rival), os.getsid(0), [0], discarded.append)


def a_round(number: int, own_ttft_s: float, rival_ttft_s: float, load: str = "steady") -> Round:
    own, rival = replace(RIGHT, ttft_p50_s=own_ttft_s), replace(RIGHT, ttft_p50_s=rival_ttft_s)
    return Round(number, load, seed=number, first="a", own=own, rival=rival, other_cpu_share=0.0)


@pytest.mark.parametrize(
    ("measured", "fault"),
    [
        (replace(RIGHT, requests=4, prompt_tokens=400, completion_tokens=40), "4 of 5 requests completed"),
        (replace(RIGHT, completion_tokens=49), "49 completion tokens in 5 requests"),
        (replace(RIGHT, prompt_tokens=520), "520 prompt tokens instead of 500"),
        (replace(RIGHT, cached_tokens=64), "64 prompt tokens came from the prefix cache"),
    ],
)
def test_another_load_is_not_compared(measured: Measured, fault: str) -> None:
    with pytest.raises(OtherLoadError, match=f"rival, steady: {fault}"):
        check_load("rival", LOAD, measured)


def test_generators_agree_within_a_tenth_of_the_median_ratio() -> None:
    [median, mean, rate] = compare([a_round(0, 1.09, 1.0), a_round(1, 5.0, 1.0), a_round(2, 1.0, 1.0)])
    assert median.ratio.median == pytest.approx(1.09)
    assert (median.ratio.low, median.ratio.high) == (1.0, 5.0)
    assert all(comparison.agrees for comparison in (median, mean, rate))


def test_generators_take_turns_at_going_first_and_no_seed_comes_twice() -> None:
    order: list[tuple[str, int]] = []
    measuring = runner(Scripted("a", [RIGHT] * 2, order), Scripted("b", [RIGHT] * 2, order), [])
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
