"""`python -m benchmarks.roofline`: bytes, operations and launches of a decode step on paper, and what the host does for
one, measured with a device that takes no time. It needs Triton and no GPU, and takes two minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.command import bind_to_cores
from benchmarks.cpu_meter import DISTURBED_SHARE, CpuMeter
from benchmarks.record import RESULTS, write_run
from benchmarks.roofline.devices import DEVICES, LAUNCH_S
from benchmarks.roofline.host import SAMPLINGS, HostPlan, HostStep, measure_step
from benchmarks.roofline.launches import build_on_meta
from benchmarks.roofline.paper import PaperStep, paper_step
from benchmarks.roofline.report import (
    TITLE,
    USUAL,
    RooflineRun,
    bound_table,
    choice_table,
    host_table,
    kernel_tables,
    left_out,
    report_of,
)
from loadgen.options.common import EXIT_OK
from loadgen.report.page import write_page, write_pictures
from loadgen.report.tables import to_markdown, to_rich

MODELS = ("llama-3-8b", "llama-2-13b", "smollm2-135m")
CONTEXT = 1024
SESSIONS = (1, 32, 128)
SWEEP = (1, 2, 4, 8, 16, 32, 64, 128)
FULL, QUICK = HostPlan(CONTEXT, 2000, 200), HostPlan(CONTEXT, 100, 20)
CORES = 2


def main() -> int:
    """Run it as the command line asks; returns the process's exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks.roofline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps of the host; writes no file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for results")
    arguments = parser.parse_args()
    console, plan = Console(), QUICK if arguments.quick else FULL
    cores = bind_to_cores(CORES)
    torch.set_num_threads(1)
    with console.status("on paper"):
        paper = paper_steps()
    meter = CpuMeter(cores, time.process_time)
    with console.status("the host, with a device that takes no time"):
        host = host_steps(plan)
    run = RooflineRun(
        model=", ".join(MODELS),
        plan=plan,
        devices=DEVICES,
        launch_s=LAUNCH_S,
        paper=paper,
        host=host,
        other_cpu_share=meter.other_share(),
    )
    tables = [bound_table(run), host_table(run), choice_table(run)]
    console.print(f"on {run.place_and_time}", highlight=False)
    console.print(to_rich(tables))
    if run.other_cpu_share > DISTURBED_SHARE:
        console.print(f"disturbed: other processes had {run.other_cpu_share:.0%} of the cores")
    if not arguments.quick:
        heading = f"# {TITLE}: {run.model} on {run.place_and_time}\n\n{left_out(run)}\n\n"
        text = heading + "\n".join(map(to_markdown, [*tables, *kernel_tables(run)]))
        path = write_run(arguments.output, "roofline-", run, text)
        page = report_of(run, ("python", "-m", "benchmarks.roofline", *sys.argv[1:]))
        write_page(page, path.with_suffix(".html"))
        write_pictures(page, path.with_suffix(".html"))
        console.print(f"written: {path}")
    return EXIT_OK


def paper_steps() -> list[PaperStep]:
    """Each model greedy at all numbers of sessions, and with the other ways to choose at those of the host."""
    steps = []
    for model in MODELS:
        stack = build_on_meta(model)
        for sampling in SAMPLINGS.items():
            counts = SWEEP if sampling[0] == USUAL else SESSIONS
            steps += [paper_step(model, stack, sessions, CONTEXT, sampling) for sessions in counts]
    return steps


def host_steps(plan: HostPlan) -> list[HostStep]:
    """All numbers of sessions and ways to choose, launched ahead; greedy in turn; and with one row of many edited."""
    ahead = [measure_step(count, sampling, plan, in_turn=False) for count in SESSIONS for sampling in SAMPLINGS]
    in_turn = [measure_step(count, USUAL, plan, in_turn=True) for count in SESSIONS]
    return [*ahead, *in_turn, measure_step(SESSIONS[-1], USUAL, plan, in_turn=True, watched=1)]


if __name__ == "__main__":
    sys.exit(main())
