"""`python -m benchmarks.kv`: KV moves beside a plain copy, and what sessions that have been away wait for."""

import argparse
import sys

from rich.console import Console

from benchmarks.arguments import exit_status, make_parser
from benchmarks.cpu_meter import DISTURBED_SHARE
from benchmarks.figures import figure_table
from benchmarks.kv.plan import FULL, QUICK
from benchmarks.kv.record import TITLE, describe_run, write_run
from benchmarks.kv.runner import measure
from benchmarks.machine import bind_to_cores
from benchmarks.tables import to_rich


def main() -> int:
    """Runs the benchmark; returns the process's exit status."""
    arguments = make_parser("python -m benchmarks.kv", __doc__).parse_args()
    return exit_status(arguments.model, lambda: _benchmark(arguments, Console()))


def _benchmark(arguments: argparse.Namespace, console: Console) -> None:
    cores = bind_to_cores(arguments.cores)
    plan = QUICK if arguments.quick else FULL
    with console.status("measuring: some minutes, less with --quick"):
        measured = measure(arguments.model, plan, cores)
    run = describe_run(arguments.model, plan, cores, measured)
    console.print(to_rich(figure_table(TITLE, run.figures)))
    if measured.other_cpu_share > DISTURBED_SHARE:
        console.print(f"disturbed: other processes had {measured.other_cpu_share:.0%} of the cores")
    if not arguments.quick:
        console.print(f"written: {write_run(arguments.output, run)}")


if __name__ == "__main__":
    sys.exit(main())
