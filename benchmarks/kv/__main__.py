"""`python -m benchmarks.kv`: KV moves beside a plain copy, and what sessions that have been away wait for."""

import sys

from benchmarks.command import Benchmark
from benchmarks.kv.plan import FULL, QUICK
from benchmarks.kv.record import TITLE, describe_run, write_run
from benchmarks.kv.runner import measure

BENCHMARK = Benchmark("benchmarks.kv", __doc__, TITLE, QUICK, FULL, measure, describe_run, write_run)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
