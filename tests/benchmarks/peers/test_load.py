"""The load client against a real server with a tiny model."""

from collections.abc import AsyncIterator

import httpx
import pytest

from benchmarks.peers.load import OpenAILoad
from benchmarks.peers.workload import Workload
from loadgen.processes.process import ServerFailedError
from tests.serving import serve

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


async def test_a_refused_request_is_an_error_with_the_servers_words(http: httpx.AsyncClient) -> None:
    with pytest.raises(ServerFailedError, match=r"HTTP 404.*no-such-model"):
        await OpenAILoad(http, "no-such-model").decode(WORKLOAD)
