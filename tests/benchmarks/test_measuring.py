"""What benchmarks measure, on a tiny model: pauses, and moves of KV."""

from collections.abc import Iterator
from dataclasses import astuple
from random import Random

import pytest

from benchmarks.breakpoints import KINDS, measure_model
from benchmarks.breakpoints import Plan as PausesPlan
from benchmarks.kv import ResumeBench, measure_parks
from benchmarks.text import TokenSource
from client import Djinn
from tests.serving import serve

MODEL = "random:tiny-llama"


def test_every_pause_and_every_kind_of_session_is_measured() -> None:
    plan = PausesPlan(decode_pauses=5, prefill_pauses=4, decode_rounds=2, decode_steps=3)  # of 3 layers: two prompts
    found = measure_model(MODEL, plan, [0], kv_device="8MiB")
    assert (len(found.decode_pauses), len(found.prefill_pauses)) == (5, 4)
    assert all(0 < seconds < 1 for pause in found.decode_pauses + found.prefill_pauses for seconds in astuple(pause))
    assert [entry.width for entry in found.rounds] == [1, 1, 16, 16]
    assert all(entry.rates.keys() == set(KINDS) and min(entry.rates.values()) > 0 for entry in found.rounds)


# Moves of KV on a server whose device holds one session.


@pytest.fixture(scope="module")
def source() -> TokenSource:
    """One for all tests: what a server has seen, it need not compute or copy again."""
    random = Random(5)
    return TokenSource([random.randrange(3, 250) for _ in range(4000)])


@pytest.fixture(scope="module")
def client() -> Iterator[Djinn]:
    with serve(kv_device="1x272", kv_host="8x272", block_size=16) as url, Djinn(url) as client:
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
