"""`python -m benchmarks.grammars`: what JSON schemas cost sessions that decode."""

import sys

from benchmarks.command import Benchmark
from benchmarks.grammars.figures import figures_of
from benchmarks.grammars.plan import FULL, QUICK, SETTINGS, TEMPERATURE, Plan
from benchmarks.grammars.runner import measure


def _spreads(plan: Plan) -> str:
    return (
        f"Rounds of each width: {plan.rounds}, with {plan.steps} steps of each kind at temperature {TEMPERATURE}.\n"
        "Spreads are the middle half of the rounds."
    )


BENCHMARK = Benchmark("grammars", "Grammars", __doc__, QUICK, FULL, measure, figures_of, lambda _: SETTINGS, _spreads)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
