"""`python -m benchmarks.drafts --runs FILE`: tokens per second with drafts and without, on recorded conversations."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.command import OwnRun, bind_to_cores, exit_status, make_parser
from benchmarks.cpu_meter import DISTURBED_SHARE
from benchmarks.drafts.figures import figures_of
from benchmarks.drafts.replay import DTYPE, Plan, measure
from benchmarks.figures import figure_table
from benchmarks.record import write_run
from loadgen.results.tables import to_markdown, to_rich

QUICK = 4
"""Conversations of a short run."""


def main() -> int:
    """Run it as the command line asks; returns the process's exit status."""
    parser = make_parser("python -m benchmarks.drafts", __doc__)
    parser.add_argument("--runs", type=Path, required=True, help="JSON lines, each with `messages` of a conversation")
    parser.add_argument("--conversations", type=int, default=60, help="how many of them; default 60")
    parser.add_argument("--turns", type=int, default=2, help="answers of each conversation; default 2")
    parser.add_argument("--streams", type=int, default=1, help="answers at once; default 1")
    parser.add_argument("--context", type=int, default=3072, help="most tokens before an answer; default 3072")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer; default 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    arguments = parser.parse_args()
    return exit_status(arguments.model, lambda: _run(arguments, Console()))


def _run(arguments: argparse.Namespace, console: Console) -> None:
    cores = bind_to_cores(arguments.cores)
    plan = Plan(
        QUICK if arguments.quick else arguments.conversations,
        arguments.turns,
        arguments.streams,
        arguments.context,
        arguments.tokens,
        arguments.temperature,
    )
    with console.status("measuring: some minutes, less with --quick"):
        measured = measure(arguments.model, arguments.runs, plan, cores)
    run = OwnRun(
        model=arguments.model.name,
        plan=plan,
        settings={"dtype": DTYPE},
        figures=figures_of(plan, measured),
        measured=measured,
    )
    table = figure_table(f"Drafts, {plan.streams} at once, temperature {plan.temperature:g}", run.figures)
    console.print(to_rich([table]))
    if measured.other_cpu_share > DISTURBED_SHARE:
        console.print(f"disturbed: other processes had {measured.other_cpu_share:.0%} of the cores")
    if not arguments.quick:
        heading = f"# Drafts: {run.model} on {run.place_and_time}"
        spreads = "Spreads are the middle half of the batches. All answers of a batch are generated at once."
        other = f"Processes outside the benchmark had {measured.other_cpu_share:.1%} of the cores."
        text = "\n".join([heading, "", spreads, other, "", to_markdown(table)])
        console.print(f"written: {write_run(arguments.output, 'drafts-', run, text)}")


if __name__ == "__main__":
    sys.exit(main())
