"""Copies between small pools."""

from dataclasses import astuple

from app.gpu.kv.header import KVLayout
from benchmarks.kv.bandwidth import CopyPlan, measure_copies

LAYOUT = KVLayout(layers=2, kv_heads=1, block_size=4, head_dim=8, dtype="float32")


def test_every_kind_of_copy_has_a_time_in_every_round() -> None:
    copies = measure_copies(LAYOUT, 8, CopyPlan(allocations=2, rounds=3), seed=1)
    assert (len(copies.rounds), len(copies.first_out_s)) == (6, 2)
    assert all(seconds > 0 for entry in copies.rounds for seconds in astuple(entry))
    assert min(copies.first_out_s) > 0
