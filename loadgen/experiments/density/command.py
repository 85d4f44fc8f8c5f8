"""`python -m loadgen density`."""

import argparse
import asyncio
from functools import partial

from rich.console import Console

from loadgen.experiments.density.experiment import run_density
from loadgen.experiments.density.measuring import Plan
from loadgen.experiments.density.outputs import write_density
from loadgen.experiments.density.report import of_report
from loadgen.experiments.density.tables import tables
from loadgen.load.trace import final_tokens
from loadgen.load.workload import plan_trace
from loadgen.options.common import add_common, finish, make_output, read_corpus, with_origin
from loadgen.options.measurement import add_measurement_options, read_measurement
from loadgen.options.targets import add_targets, read_targets
from loadgen.options.workload import add_workload_options, read_workload
from loadgen.results.tables import to_rich


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, what the agents are like, and how they are measured."""
    add_targets(parser, openai=True)
    add_common(parser)
    add_workload_options(parser)
    add_measurement_options(parser)


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    load, corpus, measurement = read_workload(options), read_corpus(options), read_measurement(options)
    plan = Plan(load, plan_trace(load), corpus, measurement)
    targets, folder = read_targets(options, context_tokens=final_tokens(plan.trace)), make_output(options)
    report = with_origin(asyncio.run(run_density(targets, plan, progress)), options)
    return finish(report, to_rich(tables(of_report(report))), partial(write_density, report, plan.trace, folder))
