"""`python -m loadgen capacity`."""

import argparse
import asyncio
from functools import partial

from rich.console import Console

from loadgen.experiments.capacity.experiment import run_capacity
from loadgen.experiments.capacity.page import make_page
from loadgen.experiments.capacity.plan import CapacityPlan
from loadgen.experiments.capacity.tables import tables
from loadgen.load.trace import final_tokens
from loadgen.options.common import add_common, finish, make_output, read_corpus, with_origin
from loadgen.options.targets import add_targets, read_targets
from loadgen.options.workload import add_drawn_options, read_drawn
from loadgen.results.page import write_outputs
from loadgen.results.tables import to_rich

DECIDED = ("agents", "rate")
"""Options of the load that the search decides."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, what the agents are like, the limits, and where the search looks."""
    add_targets(parser, openai=True)
    add_common(parser)
    add_drawn_options(parser, but=DECIDED)
    for flag, kind, default, text in (
        ("--slo-ttft", float, CapacityPlan.slo_ttft_s, "seconds that p95 of resumed first tokens is at most"),
        ("--slo-tpot", float, CapacityPlan.slo_tpot_s, "seconds per further token that p95 is at most"),
        ("--least", int, CapacityPlan.least, "agents of the first probe"),
        ("--most", int, CapacityPlan.most, "agents beyond which nothing is probed"),
        ("--rounds", int, CapacityPlan.rounds, "probes of the two numbers at the border; the majority counts"),
        ("--turn-timeout", float, CapacityPlan.turn_timeout_s, "seconds after which a turn has failed"),
    ):
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: {default:g})")


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan = CapacityPlan(
        read_drawn(options),
        least=options.least,
        most=options.most,
        rounds=options.rounds,
        slo_ttft_s=options.slo_ttft,
        slo_tpot_s=options.slo_tpot,
        turn_timeout_s=options.turn_timeout,
    )
    corpus = read_corpus(options)
    targets, folder = read_targets(options, context_tokens=final_tokens(plan.longest)), make_output(options)
    report = with_origin(asyncio.run(run_capacity(targets, plan, corpus, progress)), options)
    return finish(report, to_rich(tables(report)), partial(write_outputs, report, make_page(report), folder))
