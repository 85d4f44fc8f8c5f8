"""Pauses and decode rates on an engine with a tiny model."""

from dataclasses import astuple
from random import Random

import pytest

from app.gpu.startup import loader
from benchmarks.breakpoints.plan import KINDS, Plan
from benchmarks.breakpoints.runner import OnCpu, measure_model
from benchmarks.engine import loading
from benchmarks.engine.away import random_tokens
from benchmarks.engine.loading import build, load_layers
from benchmarks.engine.pauses import PauseBench
from benchmarks.engine.watched import WatchedStack
from tests.gpu.graphs.recording import FakeRecorder, PaddedAttention

TINY = "random:tiny-llama"


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
