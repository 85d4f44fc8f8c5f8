"""Djinn beside its peers: prompts, times, rounds, and the table of what is best."""

from __future__ import annotations

from itertools import chain

import httpx
import pytest

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
