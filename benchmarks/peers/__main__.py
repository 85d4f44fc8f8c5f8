"""`python -m benchmarks.peers`: Djinn, vLLM, llama.cpp and Transformers in alternating rounds on the same cores."""

import argparse
import sys
from collections.abc import Callable
from subprocess import CalledProcessError

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.command import bind_to_cores, exit_status, make_parser
from benchmarks.cpu_meter import DISTURBED_SHARE
from benchmarks.peers.peers import DTYPES, PEERS, TRANSFORMERS
from benchmarks.peers.report import best_types, describe_run, ratio_table, variant_table, write_run
from benchmarks.peers.rounds import Round
from benchmarks.peers.runner import PeerRunner
from benchmarks.peers.workload import FULL, QUICK, Workload, build_workload
from benchmarks.text import read_text_tokens
from loadgen.errors import LoadgenError
from loadgen.peers.dtypes import AUTO
from loadgen.peers.registry import find_peer
from loadgen.results.tables import to_rich


def main() -> int:
    """Runs the benchmark; returns the process's exit status."""
    arguments = _parse_arguments()
    return exit_status(arguments.model, lambda: _benchmark(arguments, Console()))


def _benchmark(arguments: argparse.Namespace, console: Console) -> None:
    cores = bind_to_cores(arguments.cores)
    for peer in set(arguments.only) - {TRANSFORMERS}:
        find_peer(peer).install(console.print)
    plan = QUICK if arguments.quick else FULL
    runner = PeerRunner(arguments.model, cores, plan)
    workload = build_workload(plan, read_text_tokens(arguments.model))
    variants = [(peer, dtype) for dtype in arguments.dtypes for peer in arguments.only]
    rounds = run_rounds(runner, variants, 1 if arguments.quick else arguments.rounds, workload, console)
    launches = {" ".join(variant): runner.launch(*variant, port=0) for variant in variants}
    run = describe_run(arguments.model, plan, launches, rounds)
    console.print(f"on {run.place_and_time}", *best_types(run), sep="\n", highlight=False)
    console.print(to_rich((ratio_table(rounds), variant_table(rounds))))
    if not arguments.quick:
        console.print(f"written: {write_run(arguments.output, run)}")


def run_rounds(
    runner: PeerRunner, variants: list[tuple[str, str]], count: int, workload: Workload, console: Console
) -> list[Round]:
    """`count` rounds over all variants. Each round begins with another one, so that none always runs on a cool CPU.

    If a later round fails or is broken off, the whole ones before it are what there is.
    """
    rounds: list[Round] = []
    try:
        _add_rounds(rounds, runner, variants, count, workload, console)
    except (KeyboardInterrupt, LoadgenError, httpx.HTTPError, CalledProcessError) as error:
        whole = len(rounds) // len(variants)
        if not whole:
            raise
        console.print(f"broken off after {whole} of {count} rounds, which are kept: {error!r}", markup=False)
        del rounds[whole * len(variants) :]
    return rounds


def _add_rounds(
    rounds: list[Round],
    runner: PeerRunner,
    variants: list[tuple[str, str]],
    count: int,
    workload: Workload,
    console: Console,
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=count * len(variants))
        for number in range(count):
            first = number % len(variants)
            for peer, dtype in variants[first:] + variants[:first]:
                progress.update(task, description=f"round {number + 1} of {count}: {peer} {dtype}")
                rounds.append(runner.run(number, peer, dtype, workload))
                _warn_if_disturbed(rounds[-1], progress)
                progress.advance(task)


def _warn_if_disturbed(entry: Round, progress: Progress) -> None:
    share = entry.measurement.other_cpu_share
    if share > DISTURBED_SHARE:
        progress.console.print(
            f"disturbed: other processes had {share:.0%} of the cores ({progress.tasks[0].description})"
        )


def _parse_arguments() -> argparse.Namespace:
    parser = make_parser("python -m benchmarks.peers", __doc__)
    parser.add_argument("--only", type=_names(PEERS), default=PEERS, help=f"some of {','.join(PEERS)}")
    parser.add_argument(
        "--dtypes",
        type=_names(DTYPES),
        default=(AUTO,),
        help=f"some of {','.join(DTYPES)} (default: auto, each peer in its best type)",
    )
    parser.add_argument("--rounds", type=int, choices=range(1, 21), default=3, metavar="1..20", help="default 3")
    return parser.parse_args()


def _names(allowed: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Parses a comma-separated choice out of `allowed`."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if not set(names) <= set(allowed) or len(set(names)) != len(names):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(allowed)}, each once; got {text!r}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
