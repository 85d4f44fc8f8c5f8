"""`python -m benchmarks.breakpoints`: what pausing, resuming and steering cost, and what they cost others."""

import sys

from benchmarks.breakpoints.plan import FULL, QUICK
from benchmarks.breakpoints.record import TITLE, describe_run, write_run
from benchmarks.breakpoints.runner import measure
from benchmarks.command import Benchmark

BENCHMARK = Benchmark("benchmarks.breakpoints", __doc__, TITLE, QUICK, FULL, measure, describe_run, write_run)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
