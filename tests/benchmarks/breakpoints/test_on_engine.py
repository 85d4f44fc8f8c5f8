"""The measurements on an engine with a tiny model."""

from dataclasses import astuple
from random import Random

import pytest

from app.domain.breakpoints import Until
from benchmarks.breakpoints.decoding import DecodeBench
from benchmarks.breakpoints.engine import BenchEngine
from benchmarks.breakpoints.pauses import measure_decode_pauses, measure_prefill_pauses
from benchmarks.text import TokenSource
from loadgen.processes.process import ServerFailedError


@pytest.fixture
def source() -> TokenSource:
    random = Random(5)
    return TokenSource([random.randrange(3, 250) for _ in range(8000)])


@pytest.fixture(scope="module")
def bench() -> BenchEngine:
    return BenchEngine("random:tiny-llama", kv_device="8MiB")


def test_every_pause_has_its_times(bench: BenchEngine, source: TokenSource) -> None:
    decode = measure_decode_pauses(bench, source, 5)
    prefill = measure_prefill_pauses(bench, source, 4)  # of 3 layers each: two prompts

    assert (len(decode), len(prefill)) == (5, 4)
    assert all(0 < seconds < 1 for pause in decode + prefill for seconds in astuple(pause))


def test_every_kind_of_session_decodes_in_every_round(bench: BenchEngine, source: TokenSource) -> None:
    decoding = DecodeBench(bench, source, seed=1, steps=3)

    for width in (1, 16):
        rounds = decoding.run(width, 2)
        assert [entry.width for entry in rounds] == [width, width]
        assert all(rate > 0 for entry in rounds for rate in astuple(entry))


def test_a_session_that_cannot_go_on_is_an_error(bench: BenchEngine) -> None:
    with pytest.raises(ServerFailedError):
        bench.resume(bench.open(), Until())
