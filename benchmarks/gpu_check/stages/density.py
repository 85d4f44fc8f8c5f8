"""Eighty agents over HTTP on a device that holds twenty: the load generator's `density`, at a multiple of the speed."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime

from rich.console import Console

from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.plan import DensityPlan
from benchmarks.gpu_check.rivals.vllm import SERVED
from loadgen.errors import NotAsMeant
from loadgen.experiments.density.experiment import report_of, run_density
from loadgen.experiments.density.running import Plan
from loadgen.load.corpus import python_topics
from loadgen.load.measurement import Measurement
from loadgen.load.think import Uniform
from loadgen.load.workload import Workload, plan_trace
from loadgen.peers.djinn import djinn_launch
from loadgen.processes.launch import ROOT, Launch, without_folders
from loadgen.processes.process import free_port, running_server
from loadgen.report.figures import Target
from loadgen.report.report import result_path, write_report
from loadgen.stats import Distribution, Summary
from loadgen.targets import TargetSpec
from loadgen.targets.access import RunningTarget

NONE, ALL = Target(0.0), Target(1.0, at_least=True)
TURN_TIMEOUT_S = 60.0


def run(context: StageContext) -> None:
    """One run of the trace on a server of its own."""
    run_beside(context, context.plan.density, None)


def run_beside(context: StageContext, plan: DensityPlan, rival: Callable[[int], Launch] | None) -> None:
    """The same, then one on the `rival`'s server on a port that it is given, if there is one."""
    load = _workload(plan)
    measured = Plan(load, plan_trace(load), python_topics(), Measurement(turn_timeout_s=TURN_TIMEOUT_S))
    port = free_port()
    launches: dict[str, tuple[Launch, int, str | None]] = {}
    launches["djinn"] = djinn_launch(_flags(context.device, plan, port)), port, None
    if rival is not None:
        port = free_port()
        launches["vllm"] = (rival(port), port, SERVED)
    with ExitStack() as servers:
        targets = []
        for name, (launch, port, model) in launches.items():
            url, command = f"http://127.0.0.1:{port}", without_folders(launch, [ROOT]).as_words()
            pid = servers.enter_context(running_server(launch.command, launch.environment, url))
            targets.append(RunningTarget(TargetSpec(name, url, model=model, pid=pid, command=command)))
            context.journal.fact(f"server of the agents, {name}", " ".join(command))
        found = asyncio.run(run_density(targets, measured, Console(file=sys.stderr)))
    context.journal.note(
        f"The agents' arrivals and think times are {plan.time_scale:g} of those of real time ({plan.rate:g} a second, "
        f"{plan.think[0]:g} to {plan.think[1]:g} s): the load is {1 / plan.time_scale:.1f} times as dense."
    )
    report = report_of(measured, found, "density", "Agents over HTTP")
    write_report(report, result_path(context.output, report.experiment, datetime.now(UTC), "json"))
    for target, told in zip(targets, found, strict=True):
        _report(context, told.summary(measured), "" if rival is None else f", {target.name}")


def _workload(plan: DensityPlan) -> Workload:
    return Workload(
        agents=plan.agents,
        rate=plan.rate,
        system_tokens=plan.system_tokens,
        context=plan.context,
        turns=plan.turns,
        resume_tokens=plan.resume_tokens,
        completion_tokens=plan.completion_tokens,
        think=Uniform(*plan.think),
        time_scale=plan.time_scale,
        seed=plan.seed,
    )


def _flags(device: str, plan: DensityPlan, port: int) -> dict[str, str]:
    return {
        "--model": plan.model,
        "--device": device,
        "--port": str(port),
        "--kv-device": plan.kv_device,
        "--kv-host": plan.kv_host,
        "--state-dir": "none",
    }


def _report(context: StageContext, found: Summary, of: str) -> None:
    """The figures of one server; `of` says whose they are, if there are others."""
    journal = context.journal
    if not found.turns_completed:
        raise NotAsMeant(f"no turn completed: {found.turn_errors | found.other_errors}")
    journal.value(f"Turns that completed / planned{of}", "×", found.turns_completed / found.turns_planned, ALL)
    journal.value(f"Errors{of}", "", sum(found.turn_errors.values()) + sum(found.other_errors.values()), NONE)
    journal.value(f"Most agents at once{of}", "", found.peak_agents)
    journal.value(f"Tokens generated{of}", "tok/s", found.tokens_per_s)
    for label, times in _times(found).items():
        if times is not None:
            journal.value(f"{label}{of}, p50", "ms", times.p50 * 1e3)
            journal.value(f"{label}{of}, p99", "ms", times.p99 * 1e3)
    if found.recomputed_tokens is not None:
        journal.value(f"Tokens recomputed{of}", "", found.recomputed_tokens)


def _times(found: Summary) -> dict[str, Distribution | None]:
    return {
        "First token of a first turn": found.ttft_first_s,
        "First token of a resumed turn": found.ttft_resumed_s,
        "Wake-up of a resumed turn, in the server": found.wake_up_s,
        "From token to token": found.inter_token_s,
    }
