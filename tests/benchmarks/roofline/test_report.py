"""What a reader finds on the page of a run, of made-up figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.roofline.devices import DEVICES, H100, LAUNCH_S
from benchmarks.roofline.host import HostPlan, HostStep
from benchmarks.roofline.paper import CHOICE, GRAPH, INPUTS, Kernel, PaperStep
from benchmarks.roofline.report import RooflineRun, bound_table, host_table, left_out, page_of
from benchmarks.roofline.stages import STAGES
from loadgen.results.page import write_page

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


@pytest.mark.parametrize(("us", "kept"), [(999.0, "yes"), (1001.0, "no")])
def test_the_host_has_a_millisecond_beside_a_device_that_runs(us: float, kept: str) -> None:
    ahead, in_turn = host_table(made_up(ahead=us, in_turn=5000.0)).rows
    assert (ahead[-1], in_turn[-1]) == (kept, "")


def test_the_page_says_what_the_host_was_not_measured_with(tmp_path: Path) -> None:
    run = made_up(ahead=900.0, in_turn=1100.0)
    assert "a greedy step of 128 rows launches 7 kernels, 2 copies and 2 events" in left_out(run)
    text = write_page(page_of(run, ("python", "-m", "benchmarks.roofline")), tmp_path / "page.html").read_text("utf-8")
    assert "Nothing here ran on a GPU" in text
    assert "attention" in text


def test_a_step_that_was_only_modelled_has_no_line() -> None:
    run = made_up(ahead=900.0)
    only = replace(run, host=[replace(run.host[0], sessions=64)])
    assert {row[2] for row in bound_table(only).rows} == {"64"}
