"""What a reader finds on the page of a run, of made-up figures."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.roofline.devices import DEVICES, H100, LAUNCH_S
from benchmarks.roofline.host import HostPlan, HostStep
from benchmarks.roofline.paper import CHOICE, GRAPH, INPUTS, Kernel, PaperStep
from benchmarks.roofline.report import RooflineRun, bound_table
from benchmarks.roofline.stages import STAGES

MS = int(H100.bytes_per_s / 1e3)
"""Bytes that an H100 moves in a millisecond."""
KERNELS = [
    Kernel(INPUTS, "copy", 6, 0, 0, 0),
    Kernel(GRAPH, "attention", 32, 3 * MS, 0, 0),
    Kernel(CHOICE, "argmax", 1, MS, 0, 0),
]


def made_up(**host_us: float) -> RooflineRun:
    """A run of 128 sessions whose step moves bytes for four milliseconds of an H100."""
    stages = dict.fromkeys(STAGES, 1.0)
    host = [
        HostStep(128, "greedy", name == "in_turn", us, 2 * us, stages, copies=2.0, events=2.0, tokens=1280)
        for name, us in host_us.items()
    ]
    return RooflineRun(
        model="made up",
        plan=HostPlan(1024, 10, 1),
        devices=DEVICES,
        launch_s=LAUNCH_S,
        paper=[PaperStep("made up", sessions, 1024, "greedy", KERNELS) for sessions in (64, 128)],
        host=host,
        other_cpu_share=0.0,
    )


@pytest.mark.parametrize(("us", "holds", "rate"), [(900.0, "memory", 31_600), (8000.0, "host", 16_000)])
def test_the_bound_and_the_rate_that_it_allows(us: float, holds: str, rate: int) -> None:
    [row, _] = bound_table(made_up(ahead=us)).rows  # the host was measured with 128 sessions only
    assert row[:3] == ("made up", "H100 SXM", "128")
    assert row[-1] == holds
    assert int(row[-2].replace(",", "")) == pytest.approx(rate, rel=0.01)
