"""Reports of runs that never were, made by hand and from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime

from loadgen.experiments.density.report import DensityReport, TargetReport
from loadgen.load.measurement import Measurement, Slo
from loadgen.load.records import Failure, Moves, Run, Sample, ServerTotals, SignalRecord, TurnCost, TurnRecord
from loadgen.load.trace import Trace, planned_turns, trace_sha256
from loadgen.load.workload import Workload, plan_trace
from loadgen.results.inputs import Server, Texts
from loadgen.results.origin import Machine
from loadgen.stats import spread, summarize

DEVICE_BYTES = 900 << 20
TURN_BYTES = 24 << 20
CAPACITY = DEVICE_BYTES // TURN_BYTES
STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
COMMAND = ("python", "-m", "loadgen", "density", "--target", "djinn", "--target", "vllm")
MACHINE = Machine(("avx2", "avx512f"), 2, 16 << 30, "Linux", "3.12.1")


def run_of(trace: Trace, ttft_s: float, seed: int, *, djinn: bool = True) -> Run:
    """Every turn of the trace, with times to first token around `ttft_s` from the seed; the second agent's last turn
    fails.
    """
    random_s = random.Random(seed)
    run = Run()
    for number, agent in enumerate(trace):
        due_s, tokens = agent.arrival_s, 0
        for turn, plan in enumerate(agent.turns):
            if number == 1 and plan.think_s is None:
                run.failures.append(Failure(number, turn, due_s, "RateLimited", "the <queue> is full"))
                break
            first_s = ttft_s * random_s.lognormvariate(0.0, 0.8)
            times = tuple(first_s + 0.02 * place for place in range(plan.completion_tokens))
            parts = {"queue": 300 * first_s, "restore": 100 * first_s, "prefill": 500 * first_s} if djinn else None
            prompt = tokens + plan.new_tokens
            cost = TurnCost(prompt, plan.completion_tokens, tokens, 0 if djinn else None, parts)
            record = TurnRecord(number, turn, due_s, due_s + 0.001, times, times[-1] + 0.005, cost)
            run.turns.append(record)
            tokens = prompt + plan.completion_tokens
            over_s = record.sent_s + record.latency_s
            if djinn and plan.think_s is not None:
                run.signals.append(SignalRecord(number, "io_wait", over_s, 0.002))
            due_s = over_s + (plan.think_s or 0.0)
    run.turns.sort(key=lambda record: record.sent_s + record.latency_s)
    run.duration_s = max(record.sent_s + record.latency_s for record in run.turns)
    run.samples = [_sample(run, second / 2, djinn=djinn) for second in range(int(2 * run.duration_s) + 1)]
    if djinn:
        run.totals = ServerTotals(
            {
                "out": Moves(40, 40 * TURN_BYTES, 0.9),
                "in": Moves(31, 31 * TURN_BYTES, 0.7),
                "to_disk": Moves(0, 0, 0.0),
            },
            {"dropped": 0, "late_restores": 3},
        )
    return run


def _sample(run: Run, at_s: float, *, djinn: bool) -> Sample:
    alive = len({record.agent for record in run.turns if record.sent_s <= at_s})
    running = sum(record.sent_s <= at_s < record.sent_s + record.latency_s for record in run.turns)
    device = min(alive, CAPACITY)
    return Sample(
        at_s=at_s,
        sessions={"device": device, "host": alive - device, "disk": 0} if djinn else {},
        bytes={"device": device * TURN_BYTES, "host": (alive - device) * TURN_BYTES, "disk": 0} if djinn else {},
        running=running,
        waiting=0,
        kv_used=device * TURN_BYTES / DEVICE_BYTES,
        cpu_s=1.5 * at_s,
        rss_bytes=(600 << 20) + alive * (1 << 20),
    )


def report(
    ttfts_s: Mapping[str, float] | None = None, load: Workload | None = None, repeats: int = 2, seed: int = 1
) -> DensityReport:
    """One report with these targets; those whose names begin with "djinn" tell what Djinn tells."""
    found = ttfts_s or {"djinn": 0.05, "vllm": 2.0}
    workload = load or Workload(agents=4, turns=3, completion_tokens=5, rate=2.0)
    measured = Measurement(repeats=repeats, slo=Slo(ttft_s=1.0))
    trace = plan_trace(workload)
    return DensityReport(
        seed=workload.seed,
        command=COMMAND,
        started_at=STARTED,
        machine=MACHINE,
        workload=workload,
        trace_sha256=trace_sha256(trace),
        measurement=measured,
        texts=Texts("text", "0" * 64),
        targets=tuple(_target(name, ttft, trace, measured, seed) for name, ttft in found.items()),
    )


def _target(name: str, ttft_s: float, trace: Trace, measured: Measurement, seed: int) -> TargetReport:
    djinn = name.startswith("djinn")
    runs = tuple(run_of(trace, ttft_s, seed + repeat, djinn=djinn) for repeat in range(measured.repeats))
    planned = planned_turns(trace)
    return TargetReport(
        server=Server(
            name=name,
            url="http://127.0.0.1:8000",
            protocol="djinn" if djinn else "openai",
            model=None if djinn else "tiny",
            command=("djinn", "serve", "--kv-device", "900MiB") if djinn else (),
        ),
        prompts_sha256="1" * 64,
        runs=runs,
        summary=summarize(runs, planned, measured),
        spread=spread([summarize([run], planned, measured) for run in runs]),
    )
