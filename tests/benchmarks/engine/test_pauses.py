"""Pauses and decode rates on an engine with a tiny model."""

from dataclasses import astuple

from benchmarks.breakpoints.plan import KINDS, Plan
from benchmarks.breakpoints.runner import measure_model

TINY = "random:tiny-llama"


def test_every_pause_and_every_kind_of_session_is_measured() -> None:
    plan = Plan(decode_pauses=5, prefill_pauses=4, decode_rounds=2, decode_steps=3)  # of 3 layers each: two prompts
    found = measure_model(TINY, plan, [0], kv_device="8MiB")
    assert (len(found.decode_pauses), len(found.prefill_pauses)) == (5, 4)
    assert all(0 < seconds < 1 for pause in found.decode_pauses + found.prefill_pauses for seconds in astuple(pause))
    assert [entry.width for entry in found.rounds] == [1, 1, 16, 16]
    assert all(entry.rates.keys() == set(KINDS) and min(entry.rates.values()) > 0 for entry in found.rounds)
