"""Pauses and decode rates on an engine with a tiny model."""

from collections.abc import Iterator
from dataclasses import astuple
from random import Random

import pytest

from app.domain.breakpoints import Action, Breakpoint, Pass, Until, When
from app.gpu.startup import loader
from benchmarks.breakpoints.plan import KINDS, Plan
from benchmarks.breakpoints.runner import OnCpu, measure_model
from benchmarks.engine import loading
from benchmarks.engine.away import random_tokens
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import build, load_layers
from benchmarks.engine.pauses import PauseBench
from benchmarks.engine.watched import WatchedStack
from loadgen.errors import NotAsMeant
from tests.gpu.graphs.recording import FakeRecorder, PaddedAttention

TINY = "random:tiny-llama"


@pytest.fixture(scope="module")
def watched() -> WatchedStack:
    return WatchedStack(load_layers(OnCpu(), TINY), "cpu")


@pytest.fixture(scope="module")
def live(watched: WatchedStack) -> Iterator[LiveEngine]:
    with build(OnCpu(), TINY, watched, kv_device="8MiB", kv_policy="none") as engine:
        yield engine


@pytest.fixture
def bench(live: LiveEngine, watched: WatchedStack) -> PauseBench:
    random = Random(5)
    return PauseBench(live, watched, lambda count: random_tokens(random, count))


def test_every_pause_and_every_kind_of_session_is_measured() -> None:
    plan = Plan(decode_pauses=5, prefill_pauses=4, decode_rounds=2, decode_steps=3)  # of 3 layers each: two prompts

    found = measure_model(TINY, plan, [0], kv_device="8MiB")

    assert (len(found.decode_pauses), len(found.prefill_pauses)) == (5, 4)
    assert all(0 < seconds < 1 for pause in found.decode_pauses + found.prefill_pauses for seconds in astuple(pause))
    assert [entry.width for entry in found.rounds] == [1, 1, 16, 16]
    assert all(entry.rates.keys() == set(KINDS) and min(entry.rates.values()) > 0 for entry in found.rounds)


def test_a_pause_ends_when_recorded_layers_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a decode pass that goes on replays graphs, which call nothing of the model."""
    for name in ("layer", "head"):
        monkeypatch.delattr(WatchedStack, name)
    monkeypatch.setattr(loading, "attention_for", lambda _: PaddedAttention())
    monkeypatch.setattr(loader, "choose_recorder", lambda *_, **__: FakeRecorder())
    watched, random = WatchedStack(load_layers(OnCpu(), TINY), "cpu"), Random(5)
    with build(OnCpu(), TINY, watched, max_running=2, kv_device="1MiB", kv_policy="none") as live:
        pauses = PauseBench(live, watched, lambda count: random_tokens(random, count)).in_decode(8, 8)
        assert live.memory().steps.in_runs > 0
    assert all(0 < pause.restore_s < 1 for pause in pauses)


def test_a_session_that_cannot_go_on_is_an_error(live: LiveEngine) -> None:
    with pytest.raises(NotAsMeant):
        live.finish(live.resume(live.open(), Until()))


def test_a_turn_that_ends_is_no_pause(bench: PauseBench, live: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    never = Breakpoint("never", (0,), Action.PAUSE, When(Pass.DECODE, position=10**6))
    opened = live.open
    monkeypatch.setattr(live, "open", lambda breakpoints: opened([never]))

    with pytest.raises(NotAsMeant, match="was to pause"):
        bench.in_decode(1, 8)
