"""`python -m benchmarks.breakpoints`: what pausing, resuming and steering cost, and what they cost others."""

import sys

from benchmarks.breakpoints.figures import figures_of
from benchmarks.breakpoints.plan import FULL, QUICK, SETTINGS, Plan
from benchmarks.breakpoints.runner import measure
from benchmarks.command import Benchmark


def _spreads(plan: Plan) -> str:
    return (
        f"Pauses: {plan.decode_pauses} in decode, {plan.prefill_pauses} in prefill. "
        f"Rounds of each width: {plan.decode_rounds}, with {plan.decode_steps} steps of each kind.\n"
        "Spreads are the middle half of the pauses or of the rounds."
    )


BENCHMARK = Benchmark(
    "breakpoints", "Breakpoints", __doc__, QUICK, FULL, measure, figures_of, lambda _: SETTINGS, _spreads
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
