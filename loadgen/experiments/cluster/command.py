"""`python -m loadgen cluster`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from rich.console import Console

from loadgen.experiments.cluster.experiment import run_cluster
from loadgen.experiments.cluster.measuring import Work
from loadgen.experiments.cluster.page import make_page
from loadgen.experiments.cluster.plan import ClusterPlan, Router
from loadgen.experiments.cluster.report import ClusterReport
from loadgen.experiments.cluster.tables import tables
from loadgen.load.think import Uniform
from loadgen.load.workload import Workload, plan_trace
from loadgen.options.common import add_common, finish, make_output, read_corpus, with_origin
from loadgen.options.models import whole_model
from loadgen.options.plan_fields import integers
from loadgen.options.workload import add_workload_options, read_workload
from loadgen.results.page import write_outputs
from loadgen.results.tables import to_rich

TINY = "random:tiny-llama"
LOAD = Workload(
    agents=16,
    rate=4.0,
    context=256,
    turns=6,
    resume_tokens=24,
    completion_tokens=24,
    think=Uniform(1.0, 4.0),
    system_tokens=64,
)
"""What fits the tiny model."""
DEFAULT = ClusterPlan()


def _routers(text: str) -> tuple[Router, ...]:
    """Such as `owner,hash`."""
    try:
        return tuple(map(Router, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be owner, hash, or both with a comma between, not {text!r}") from None


OPTIONS: tuple[tuple[str, Callable[[str], Any], str, str], ...] = (
    ("replicas", integers, "N,N,...", "sizes of the clusters, one after the other"),
    ("routers", _routers, "owner,hash", "who chooses a turn's replica, one after the other"),
    ("moves_per_second", float, "N", "sessions that an operator moves while they rest"),
    ("kill_every", float, "S", "seconds from a replica's return to the next kill -9; without it none is killed"),
    ("kills", int, "N", "kills at most; fewer are a missed target. 0: as many as come"),
    ("drain_at", float, "S", "second at which a replica gets SIGTERM; without it none does"),
    ("turn_timeout", float, "S", "seconds until a turn has failed, with all retries"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, what the agents are like, and the fields of `ClusterPlan`."""
    add_common(parser)
    parser.add_argument("--model", default=TINY, metavar="MODEL", help=f"what `djinn serve` takes (default: {TINY})")
    add_workload_options(parser, LOAD)
    for name, read, form, text in OPTIONS:
        usual = getattr(DEFAULT, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=read, default=usual, metavar=form, help=f"{text}{_default(usual)}"
        )
    parser.add_argument(
        "--standby", action="store_true", help="start the clusters with `--standby`: killed replicas return sooner"
    )


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan = ClusterPlan(**{field.name: getattr(options, field.name) for field in fields(ClusterPlan)})
    load, corpus = read_workload(options, LOAD), read_corpus(options)
    work = Work(plan, load, plan_trace(load), corpus, whole_model(options.model))
    folder = make_output(options)
    report: ClusterReport = with_origin(asyncio.run(run_cluster(work, progress)), options)
    return finish(report, to_rich(tables(report)), partial(write_outputs, report, make_page(report), folder))


def _default(usual: object) -> str:
    if usual is None:
        return ""
    shown = ",".join(map(str, usual)) if isinstance(usual, tuple) else f"{usual:g}"
    return f" (default: {shown})"
