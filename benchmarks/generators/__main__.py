"""`python -m benchmarks.generators`: the load generator and GuideLLM in alternating rounds on the same Djinn server."""

import argparse
import sys

from rich.console import Console

from benchmarks.command import bind_to_cores, exit_status, make_parser
from benchmarks.cpu_meter import DISTURBED_SHARE
from benchmarks.generators.comparison import Comparison, Round, compare
from benchmarks.generators.environment import ensure_guidellm, guidellm_environment, versions
from benchmarks.generators.generator import Endpoint
from benchmarks.generators.guidellm import GuideLLM
from benchmarks.generators.load import FULL, QUICK, Load
from benchmarks.generators.own import OwnGenerator
from benchmarks.generators.report import Run, comparison_table, write_run
from benchmarks.generators.rounds import RoundRunner
from loadgen.options.common import EXIT_FAILED
from loadgen.peers.base import SERVED_NAME, ServerSettings
from loadgen.peers.djinn import DjinnPeer
from loadgen.peers.dtypes import AUTO, CHOICES
from loadgen.processes.launch import ROOT, Launch, without_folders
from loadgen.processes.process import free_port, running_server
from loadgen.results.origin import machine
from loadgen.results.tables import to_rich

DJINN = DjinnPeer("djinn", "signal")


def main() -> int:
    """Runs the benchmark; returns the process's exit status: 1 also where the generators differ too much."""
    parser = make_parser("python -m benchmarks.generators", __doc__)
    parser.add_argument("--rounds", type=int, choices=range(1, 21), default=5, metavar="1..20", help="default 5")
    parser.add_argument("--dtype", choices=CHOICES, default=AUTO, help="of weights and KV (default auto: Djinn's own)")
    arguments = parser.parse_args()
    found: list[Comparison] = []
    status = exit_status(arguments.model, lambda: found.extend(_benchmark(arguments, Console())))
    return status or (0 if all(comparison.agrees for comparison in found) else EXIT_FAILED)


def _benchmark(arguments: argparse.Namespace, console: Console) -> list[Comparison]:
    cores = bind_to_cores(arguments.cores)
    with console.status("GuideLLM's environment: a minute or two the first time"):
        ensure_guidellm(guidellm_environment())
    loads, count = (QUICK, 1) if arguments.quick else (FULL, arguments.rounds)
    port = free_port()
    settings = ServerSettings(arguments.model, arguments.dtype, cores=tuple(cores))
    launch = DJINN.launch(settings, port)
    endpoint = Endpoint(f"http://127.0.0.1:{port}", SERVED_NAME, arguments.model.resolve())
    discarded: list[str] = []
    rounds = _run_rounds(launch, endpoint, loads, count, cores, discarded, console)
    comparisons = compare(rounds)
    table = comparison_table(comparisons, OwnGenerator.name, GuideLLM.name)
    console.print(f"on {machine()}", highlight=False)
    console.print(to_rich([table]))
    if not arguments.quick:
        run = Run(
            model=arguments.model.name,
            rival_versions=versions(guidellm_environment()),
            launch=without_folders(launch, [ROOT, arguments.model.parent]),
            loads=loads,
            rounds=rounds,
            comparisons=comparisons,
            discarded=discarded,
        )
        console.print(f"written: {write_run(arguments.output, run, table)}")
    return comparisons


def _run_rounds(
    launch: Launch,
    endpoint: Endpoint,
    loads: tuple[Load, ...],
    count: int,
    cores: list[int],
    discarded: list[str],
    console: Console,
) -> list[Round]:
    """`count` rounds of every load on one server. Raises ServerFailedError."""

    def discard(reason: str) -> None:
        console.print(f"measured again: {reason}")
        discarded.append(reason)

    generators = OwnGenerator(), GuideLLM(guidellm_environment())
    rounds = []
    with running_server(launch.command, launch.environment, endpoint.url) as server:
        runner = RoundRunner(endpoint, generators, server, cores, discard)
        for load in loads:
            runner.warm_up(load)
        for number in range(count):
            for load in loads:
                with console.status(f"round {number + 1} of {count}: {load.name}"):
                    rounds.append(runner.run(number, load))
                if rounds[-1].other_cpu_share > DISTURBED_SHARE:
                    share = f"{rounds[-1].other_cpu_share:.0%}"
                    console.print(f"disturbed: other processes had {share} of the cores ({load.name}, {number + 1})")
    return rounds


if __name__ == "__main__":
    sys.exit(main())
