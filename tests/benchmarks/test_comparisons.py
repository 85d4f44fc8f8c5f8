"""Djinn beside its peers, and its load generator beside another: the load, its checks, times, and what is best."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import httpx
import orjson
import pytest

from benchmarks.generators.comparison import Round as GeneratorsRound
from benchmarks.generators.comparison import compare
from benchmarks.generators.guidellm import read_report
from benchmarks.generators.load import Load
from benchmarks.generators.measured import Measured, OtherLoadError, check_load
from benchmarks.peers.load import OpenAILoad
from benchmarks.peers.rounds import Measurement, Round
from benchmarks.peers.summary import Best, Metric, best_by_peer
from benchmarks.peers.timeline import DecodePhase, Stream, measure_decode
from benchmarks.peers.workload import FULL, Workload, build_workload
from loadgen.results.spread import Spread
from tests.serving import serve


def test_no_part_of_the_text_is_asked_twice_for_a_prefix_cache_to_find() -> None:
    workload = build_workload(FULL, list(range(40_000)))
    decode = [prompt for batch in workload.decode for prompt in batch]
    tokens = [*workload.warm_up_long, *chain(*workload.warm_up, *decode, *workload.long)]
    assert len(tokens) == len(set(tokens))
    with pytest.raises(ValueError, match="share their first"):
        build_workload(FULL, [7] * 40_000)


THROUGHPUT = Metric("throughput_8", "Throughput, 8 streams", "tok/s", True)


def make_round(number: int, peer: str, dtype: str, throughput: float) -> Round:
    phase = DecodePhase(8, 512, 512 / throughput, throughput, 2 * throughput, [0.1] * 8)
    return Round(number, peer, dtype, None, Measurement([phase], [1.0], 0.0, 0.0))


RATES: dict[tuple[str, str], tuple[float, ...]] = {
    ("djinn", "float32"): (200, 300),
    ("vllm", "float32"): (100, 100),
    ("vllm", "bfloat16"): (50, 150, 160),
}


def test_a_peer_stands_with_its_better_data_type_by_the_median_of_its_rounds() -> None:
    rounds = [make_round(number, *peer, rate) for peer, rates in RATES.items() for number, rate in enumerate(rates)]
    best = best_by_peer(rounds, THROUGHPUT)
    assert best["vllm"] == Best("bfloat16", Spread(150.0, 50.0, 160.0, 3))
    assert best["djinn"] == Best("float32", Spread(250.0, 200.0, 300.0, 2))


def test_throughput_counts_from_the_first_submission_to_the_last_token_and_tokens_that_share_a_chunk() -> None:
    early = Stream(submitted=10.0, arrivals=[11.0, 13.0], tokens=4)
    late = Stream(submitted=10.5, arrivals=[12.0, 13.0, 14.0], tokens=3)
    phase = measure_decode([early, late])
    assert (phase.streams, phase.tokens, phase.wall_s) == (2, 7, 4.0)
    assert phase.throughput == pytest.approx(7 / 4)
    assert phase.first_token_s == [1.0, 1.5]


WORKLOAD = Workload(
    max_tokens=6,
    warm_up=[[1, 2, 3], [4, 5, 6]],
    warm_up_long=list(range(40)),
    decode=[[[7, 8, 9]], [[10, 11, 12], [13, 14, 15]]],
    long=[list(range(10, 60)), list(range(20, 70))],
)


async def test_every_stream_brings_all_its_tokens_and_every_long_prompt_a_time() -> None:
    with serve(served_name="tiny") as base_url:
        async with httpx.AsyncClient(base_url=base_url, timeout=30) as http:
            load = OpenAILoad(http, "tiny")
            await load.warm_up(WORKLOAD)
            phases, times = await load.decode(WORKLOAD), await load.first_tokens_s(WORKLOAD)
    assert [(phase.streams, phase.tokens) for phase in phases] == [(1, 6), (2, 12)]
    assert all(0 < first < phase.wall_s for phase in phases for first in phase.first_token_s)
    assert len(times) == 2
    assert min(times) > 0


# The load generator beside another.

LOAD = Load("steady", requests=5, rate=2.0, prompt_tokens=100, completion_tokens=10)
RIGHT = Measured(5, 500, 50, 0, ttft_p50_s=0.1, ttft_mean_s=0.2, tokens_per_s=20, latest_s=0.01)


def a_round(number: int, own_ttft_s: float) -> GeneratorsRound:
    """In which the rival has 1 s."""
    own, rival = replace(RIGHT, ttft_p50_s=own_ttft_s), replace(RIGHT, ttft_p50_s=1.0)
    return GeneratorsRound(number, "steady", seed=number, first="a", own=own, rival=rival, other_cpu_share=0.0)


@pytest.mark.parametrize(
    ("measured", "fault"),
    [
        (replace(RIGHT, requests=4), "4 of 5 requests completed"),
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
