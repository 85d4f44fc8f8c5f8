"""Djinn beside its peers: prompts, times, rounds, and the table of what is best."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from benchmarks.peers.load import OpenAILoad
from benchmarks.peers.rounds import Measurement, Round
from benchmarks.peers.summary import Best, Metric, best_by_peer
from benchmarks.peers.timeline import DecodePhase, Stream, measure_decode
from benchmarks.peers.workload import FULL, Workload, build_workload
from loadgen.results.spread import Spread
from tests.serving import serve

TEXT = list(range(40_000))


def all_prompts(workload: Workload) -> list[list[int]]:
    decode = [prompt for batch in workload.decode for prompt in batch]
    return [*workload.warm_up, workload.warm_up_long, *decode, *workload.long]


def test_no_part_of_the_text_is_asked_twice() -> None:
    tokens = [token for prompt in all_prompts(build_workload(FULL, TEXT)) for token in prompt]
    assert len(tokens) == len(set(tokens))


def test_prompts_that_a_prefix_cache_could_share_are_refused() -> None:
    with pytest.raises(ValueError, match="share their first"):
        build_workload(FULL, [7] * 40_000)


THROUGHPUT = Metric("throughput_8", "Throughput, 8 streams", "tok/s", True)


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


def test_a_peer_stands_with_its_better_data_type_by_the_median_of_its_rounds() -> None:
    best = best_by_peer(ROUNDS, THROUGHPUT)
    assert best["vllm"] == Best("bfloat16", Spread(150.0, 50.0, 160.0, 3))
    assert best["djinn"] == Best("float32", Spread(250.0, 200.0, 300.0, 2))


def test_throughput_counts_from_the_first_submission_to_the_last_token() -> None:
    early = Stream(submitted=10.0, arrivals=[11.0, 12.0, 13.0], tokens=3)
    late = Stream(submitted=10.5, arrivals=[12.0, 13.0, 14.0], tokens=3)
    phase = measure_decode([early, late])
    assert (phase.streams, phase.tokens, phase.wall_s) == (2, 6, 4.0)
    assert phase.throughput == pytest.approx(6 / 4)
    assert phase.first_token_s == [1.0, 1.5]


def test_tokens_that_share_a_chunk_are_all_counted() -> None:
    one_by_one = Stream(submitted=0.0, arrivals=[1.0, 2.0, 3.0, 4.0], tokens=4)
    in_pairs = Stream(submitted=0.0, arrivals=[2.0, 4.0], tokens=4)
    assert measure_decode([in_pairs]).throughput == measure_decode([one_by_one]).throughput
    assert measure_decode([in_pairs]).decode_rate == pytest.approx(2 / 2)


WORKLOAD = Workload(
    max_tokens=6,
    warm_up=[[1, 2, 3], [4, 5, 6]],
    warm_up_long=list(range(40)),
    decode=[[[7, 8, 9]], [[10, 11, 12], [13, 14, 15]]],
    long=[list(range(10, 60)), list(range(20, 70))],
)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    with serve(served_name="tiny") as base_url:
        async with httpx.AsyncClient(base_url=base_url, timeout=30) as client:
            yield client


async def test_every_stream_brings_all_its_tokens(http: httpx.AsyncClient) -> None:
    load = OpenAILoad(http, "tiny")
    await load.warm_up(WORKLOAD)
    phases = await load.decode(WORKLOAD)
    assert [(phase.streams, phase.tokens) for phase in phases] == [(1, 6), (2, 12)]
    assert all(0 < first < phase.wall_s for phase in phases for first in phase.first_token_s)


async def test_every_long_prompt_gives_a_time(http: httpx.AsyncClient) -> None:
    times = await OpenAILoad(http, "tiny").first_tokens_s(WORKLOAD)
    assert len(times) == 2
    assert min(times) > 0
