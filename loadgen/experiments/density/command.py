"""`python -m loadgen density`."""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from loadgen.experiments.density.experiment import report_of, run_density
from loadgen.experiments.density.running import Plan
from loadgen.load.measurement import Measurement
from loadgen.load.trace import final_tokens, write_trace
from loadgen.load.workload import plan_trace
from loadgen.options.common import add_common, finish, make_output, read_corpus
from loadgen.options.plan_fields import add_plan_options, read_plan
from loadgen.options.targets import add_targets, read_targets
from loadgen.options.workload import add_workload_options, read_workload
from loadgen.report.page import write_outputs
from loadgen.report.report import Report, result_path

TITLE = "Density: agents that generate, think and come back"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, what the agents are like, and how they are measured."""
    add_targets(parser, openai=True)
    add_common(parser)
    add_workload_options(parser)
    add_plan_options(parser, Measurement)


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    load, corpus, measurement = read_workload(options), read_corpus(options), read_plan(options, Measurement)
    plan = Plan(load, plan_trace(load), corpus, measurement)
    targets = read_targets(options, context_tokens=final_tokens(plan.trace))
    make_output(options)
    found = asyncio.run(run_density(targets, plan, progress))

    def write(report: Report, folder: Path) -> Sequence[Path]:
        """Also the trace, with which it can be run again."""
        replay = result_path(folder, "trace", report.started_at, "jsonl")
        write_trace(plan.trace, replay)
        return [*write_outputs(report, folder), replay]

    return finish(report_of(plan, found, "density", TITLE), options, write)
