"""The measurements of KV: copies between small pools, and a real server whose device holds one session."""

from collections.abc import Iterator
from dataclasses import astuple
from random import Random

import pytest

from app.gpu.kv.header import KVLayout
from benchmarks.kv.bandwidth import CopyPlan, measure_copies
from benchmarks.kv.parks import measure_parks
from benchmarks.kv.resume import ResumeBench
from benchmarks.kv.signals import measure_signals
from benchmarks.text import TokenSource
from client import Djinn
from tests.serving import serve

LAYOUT = KVLayout(layers=2, kv_heads=1, block_size=4, head_dim=8, dtype="float32")


def test_every_kind_of_copy_has_a_time_in_every_round() -> None:
    copies = measure_copies(LAYOUT, 8, CopyPlan(allocations=2, rounds=3), seed=1)
    assert (len(copies.rounds), len(copies.first_out_s)) == (6, 2)
    assert all(seconds > 0 for entry in copies.rounds for seconds in astuple(entry))
    assert min(copies.first_out_s) > 0


@pytest.fixture(scope="module")
def source() -> TokenSource:
    """One for all tests: what a server has seen, it need not compute or copy again."""
    random = Random(5)
    return TokenSource([random.randrange(3, 250) for _ in range(4000)])


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with serve(kv_device="1x272", kv_host="8x272", block_size=16) as base_url:
        yield base_url


@pytest.fixture
def client(base_url: str) -> Iterator[Djinn]:
    with Djinn(base_url) as client:
        yield client


@pytest.mark.long
def test_only_a_cold_turn_waits_for_its_kv(client: Djinn, source: TokenSource) -> None:
    bench = ResumeBench(client, source, seed=1, history_tokens=200, other_tokens=256)
    rounds = bench.run(2)
    bench.close()
    assert len(rounds) == 2
    for entry in rounds:
        assert entry.resident.restore_s == entry.ready.restore_s == 0
        assert 0 < entry.cold.restore_s < entry.cold.first_token_s
    assert not client.memory().sessions


def test_a_second_park_copies_what_is_new(client: Djinn, source: TokenSource) -> None:
    [parked] = measure_parks(client, source, 1, tokens=160, growth=32)
    # 10 blocks; then the last of them, which had room for one token, and 2 more.
    block_bytes = client.memory().data.block_bytes
    assert (parked.first_bytes, parked.second_bytes) == (10 * block_bytes, 3 * block_bytes)


def test_signals_are_timed(client: Djinn, base_url: str, source: TokenSource) -> None:
    times = measure_signals(client, base_url, source, signals=4, tokens=40)
    assert len(times.round_trips_s) == 4
    assert min(times.round_trips_s) > 0
    if times.server is not None:
        assert times.server[-1].count == 4
