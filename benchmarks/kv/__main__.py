"""`python -m benchmarks.kv`: KV moves beside a plain copy, and what sessions that have been away wait for."""

import sys
from pathlib import Path

from benchmarks.command import Benchmark
from benchmarks.kv.figures import figures_of
from benchmarks.kv.plan import FULL, QUICK, Plan
from benchmarks.kv.runner import measure, server_launch
from loadgen.processes.launch import ROOT, Launch, without_folders


def _settings(model: Path) -> Launch:
    return without_folders(server_launch(model, port=0), [ROOT, model.parent])


def _spreads(plan: Plan) -> str:
    return (
        f"Copies: {plan.copies.allocations * plan.copies.rounds} of each kind. "
        f"Turns: {plan.resume_rounds} of each kind. Sessions parked twice: {plan.parks}. Signals: {plan.signals}.\n"
        "Spreads are the middle half of the rounds, those of parks and first moves the lowest and the highest."
    )


BENCHMARK = Benchmark("kv", "KV between tiers", __doc__, QUICK, FULL, measure, figures_of, _settings, _spreads)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
