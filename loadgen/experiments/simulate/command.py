"""`python -m loadgen simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from rich.console import Console

from loadgen.errors import LoadgenError
from loadgen.experiments.simulate.costs import Costs, mean_of
from loadgen.experiments.simulate.measuring.calibrating import Calibration, calibrate
from loadgen.experiments.simulate.measuring.validating import Validation, judge, validate
from loadgen.experiments.simulate.outcome import Outcome, outcome
from loadgen.experiments.simulate.page import make_page
from loadgen.experiments.simulate.plan import ClusterPlan, Event, Policy
from loadgen.experiments.simulate.population import population
from loadgen.experiments.simulate.report import SimulateReport
from loadgen.experiments.simulate.tables import tables
from loadgen.experiments.simulate.world.simulation import simulate
from loadgen.load.workload import Workload
from loadgen.options.common import add_common, finish, make_output, read_corpus, with_origin
from loadgen.options.disk import with_disk
from loadgen.options.plan_fields import integers, numbers
from loadgen.options.servers import DEFAULT_KV, kv_tokens
from loadgen.options.targets import add_targets, read_targets, run_on
from loadgen.options.workload import add_drawn_options, read_drawn
from loadgen.results.files import read_result
from loadgen.results.inputs import Server
from loadgen.results.origin import machine
from loadgen.results.page import write_outputs
from loadgen.results.tables import to_rich
from loadgen.targets import TargetSpec

DEFAULT = ClusterPlan()
GB = 1e9


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where costs come from, the cluster, what happens to it, and what the agents of each replica are like."""
    add_targets(parser, required=False)
    add_common(parser)
    parser.add_argument("--costs", type=Path, metavar="FILE", help="take the costs of this result of simulate")
    parser.add_argument(
        "--validate", type=integers, default=(), metavar="SEED,SEED,...", help="run these traces on the target too"
    )
    cluster = parser.add_argument_group("the simulated cluster")
    cluster.add_argument("--replicas", type=integers, default=(), metavar="N,N,...", help="sizes of clusters")
    cluster.add_argument(
        "--policy", type=Policy, action="append", metavar="|".join(Policy), help="repeat for more (default: all)"
    )
    cluster.add_argument(
        "--event", action="append", default=[], metavar="WHAT@SECOND", help="what happens; repeat for more"
    )
    cluster.add_argument("--rates", type=numbers, metavar="N,N,...", help="several rates instead of --rate")
    for name, tokens in (("host", DEFAULT.host_tokens), ("disk", DEFAULT.disk_tokens)):
        shown = f"{tokens // 1024}x1024"
        cluster.add_argument(
            f"--{name}", type=kv_tokens, default=tokens, metavar="SESSIONSxTOKENS", help=f"room (default: {shown})"
        )
    for flag, default, text in (
        ("network", DEFAULT.link_bytes_per_s / GB, "GB/s between replicas"),
        ("down", DEFAULT.down_s, "seconds until a replica is back"),
    ):
        cluster.add_argument(
            f"--{flag}", type=float, default=default, metavar="N", help=f"{text} (default: {default:g})"
        )
    add_drawn_options(parser)


def run(options: argparse.Namespace, progress: Console) -> int:
    """Calibrate, validate and simulate; print and write what came of it. Raises `LoadgenError`."""
    load, folder = read_drawn(options), make_output(options)
    plan = ClusterPlan(
        device_tokens=options.kv or kv_tokens(DEFAULT_KV),
        host_tokens=options.host,
        disk_tokens=options.disk,
        link_bytes_per_s=options.network * GB,
        down_s=options.down,
        events=tuple(map(Event.parse, options.event)),
    )
    report = _measured(options, load, plan, progress)
    outcomes = tuple(_outcomes(options, report, progress))
    if not (outcomes or report.validations or options.target):
        raise LoadgenError("nothing to do: name --replicas to simulate, or a --target to measure")
    report = with_origin(replace(report, outcomes=outcomes), options)
    return finish(report, to_rich(tables(report)), partial(write_outputs, report, make_page(report), folder))


def _measured(options: argparse.Namespace, load: Workload, plan: ClusterPlan, progress: Console) -> SimulateReport:
    """The report with all that is measured: costs, by a target or of a file, and validations."""
    known = None if options.costs is None else read_result(options.costs, SimulateReport)
    if options.target is not None:
        return _on_target(options, load, plan, known, progress)
    if options.validate:
        raise LoadgenError("--validate needs a --target")
    if known is None:
        raise LoadgenError("costs are missing: name a --target to measure, or a result with --costs")
    return replace(known, seed=load.seed, workload=load, plan=plan, machine=machine(), validations=(), verdicts=())


def _on_target(
    options: argparse.Namespace, load: Workload, plan: ClusterPlan, known: SimulateReport | None, progress: Console
) -> SimulateReport:
    if len(options.target) > 1:
        raise LoadgenError("simulate takes one target")
    corpus = read_corpus(options)

    async def experiment(specs: list[TargetSpec]) -> SimulateReport:
        (spec,) = specs

        async def measure() -> Calibration:
            return await calibrate(spec, corpus, load, kv_tokens=plan.device_tokens, console=progress)

        async def again() -> Costs:
            return (await measure()).costs

        if known is not None:
            found, server, on = known.calibration, known.server, known.calibrated_on
        else:
            found, server, on = await measure(), Server.of(spec), machine()
        costs, alone = [found.costs], replace(plan, front_s=0.0, events=())
        validations: tuple[Validation, ...] = ()
        if options.validate:
            repeated = again if known is None else None
            validations = await validate(spec, load, options.validate, corpus, alone, costs, repeated)
        found = replace(found, costs=mean_of(costs))
        return SimulateReport(
            seed=load.seed,
            workload=load,
            plan=plan,
            calibration=found,
            calibrated_on=on,
            server=server,
            validations=validations,
            verdicts=judge(validations),
            outcomes=(),
        )

    with with_disk(read_targets(options, read_elsewhere=("kv",))) as ready:
        return run_on(ready, experiment)


def _outcomes(options: argparse.Namespace, report: SimulateReport, progress: Console) -> Iterator[Outcome]:
    """Every size at every rate under every policy."""
    costs, every = report.calibration.costs, options.policy or tuple(Policy)
    for size, rate, policy in product(options.replicas, options.rates or (report.workload.rate,), every):
        plan, load = replace(report.plan, replicas=size), replace(report.workload, rate=rate)
        done = simulate(plan, policy, costs, population(load, size), load.signals, load.system_tokens)
        found = outcome(done, size, policy, rate)
        told = f"{size:,} replicas, {policy}, {rate:g}/s: {found.turns:,} turns in {found.took_s:.1f} s of a processor"
        progress.print(told, markup=False)
        yield found
