"""`python -m loadgen resume-latency`."""

import argparse
from functools import partial

from rich.console import Console

from loadgen.experiments.resume_latency.away import SPARE_TOKENS
from loadgen.experiments.resume_latency.experiment import run_resume_latency
from loadgen.experiments.resume_latency.page import make_page
from loadgen.experiments.resume_latency.plan import QUICK, ResumePlan
from loadgen.experiments.resume_latency.tables import tables
from loadgen.options.common import add_common, each_target, finish, make_output, read_corpus, with_origin
from loadgen.options.plan_fields import add_plan_options, integers, numbers, read_plan, with_default
from loadgen.options.servers import read_settings
from loadgen.options.targets import add_targets, read_targets, run_on
from loadgen.results.page import write_outputs

FULL = ResumePlan()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, and the fields of `ResumePlan`."""
    add_targets(parser, kv=None)
    add_common(parser)
    lengths = with_default("tokens of the sessions", FULL, QUICK, "lengths")
    depths = with_default("where to pause, in %% of the layers", FULL, QUICK, "depths")
    parser.add_argument("--lengths", type=integers, metavar="N,N,...", help=lengths)
    parser.add_argument("--depths", type=numbers, metavar="%,%,...", help=depths)
    add_plan_options(parser, FULL, QUICK, {"repeats": "samples of each way and place", "seed": "of texts"})


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan = read_plan(options, FULL, QUICK)
    targets = read_targets(options, kv_tokens=max(plan.lengths) + SPARE_TOKENS, read_elsewhere=["model"])
    corpus, folder = read_corpus(options), make_output(options)
    # What a running server runs is known only if the user said it.
    knows_model = options.model is not None or any(target.running is None for target in targets)
    model = read_settings(options).model if knows_model else None
    report = run_on(targets, lambda specs: run_resume_latency(specs, plan, model, corpus, progress))
    report = with_origin(report, options)
    shown = each_target(report.targets, tables)
    return finish(report, shown, partial(write_outputs, report, make_page(report), folder))
