"""`python -m benchmarks.agents`: the same eighty agents against one server after the other, in real time."""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.agents.servers import POLICIES, SESSIONS, TOKENS, VLLM, launch, target
from benchmarks.arguments import exit_status, make_parser
from benchmarks.launch import ROOT, without_folders
from benchmarks.machine import bind_to_cores, describe_machine
from benchmarks.peers.vllm_environment import VLLM_ENVIRONMENT
from benchmarks.results import file_stem, utc_now, write_results
from benchmarks.server_process import free_port, running_server
from loadgen.cli import main as loadgen

FULL = {"--agents": "80", "--rate": "0.2", "--context": "1024", "--turns": "6", "--think": "10:20"}
QUICK = {"--agents": "4", "--rate": "2", "--context": "256", "--turns": "2", "--think": "1:2"}
SEED = "1"


@dataclass(frozen=True, slots=True)
class Run:
    """What `results/` keeps: one report of the load generator for each server."""

    date: str
    machine: Any
    dtype: str
    commands: dict[str, list[str]]
    reports: dict[str, Any]


def main() -> int:
    """Runs the benchmark; returns the process's exit status."""
    parser = make_parser("python -m benchmarks.agents", __doc__)
    parser.add_argument("--servers", default=f"{','.join(POLICIES)},{VLLM}", help="some of signal,lru,none,vllm")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV, for every server (default: bfloat16)")
    arguments = parser.parse_args()
    return exit_status(arguments.model, lambda: _benchmark(arguments))


def _benchmark(arguments: argparse.Namespace) -> None:
    cores = bind_to_cores(arguments.cores)
    load = QUICK if arguments.quick else FULL
    reports, commands = {}, {}
    for server in arguments.servers.split(","):
        port = free_port()
        started = launch(server, arguments.model, arguments.dtype, port, cores)
        folders = [ROOT, VLLM_ENVIRONMENT.parent, arguments.model.parent]
        commands[server] = without_folders(started, folders).command
        url = f"http://127.0.0.1:{port}"
        with running_server(started.command, started.environment, url):
            reports[server] = _drive(target(server, url), load)
    table = _table(reports, arguments.dtype)
    print(table)
    if not arguments.quick:
        date = utc_now()
        machine = describe_machine(cores)
        run = Run(date, machine, arguments.dtype, commands, reports)
        print(
            "written:",
            write_results(arguments.output, f"agents-{file_stem(machine.cpu, len(cores), date)}", run, table),
        )


def _drive(name: str, load: dict[str, str]) -> Any:
    """Run the load generator against one target; returns its report."""
    flags = [part for pair in load.items() for part in pair]
    with tempfile.TemporaryDirectory() as folder:
        loadgen(["density", "--target", name, "--seed", SEED, "--output", folder, *flags])
        [file] = Path(folder).glob("*.json")
        return orjson.loads(file.read_bytes())


def _table(reports: dict[str, Any], dtype: str) -> str:
    """Markdown: one column for each server."""
    summaries = {server: report["targets"][0]["summary"] for server, report in reports.items()}

    def times(name: str, percentile: str) -> list[str]:
        return [f"{s[name][percentile]:.3f}" if s[name] else "" for s in summaries.values()]

    rows = {
        "turns completed": [f"{s['turns_completed']} of {s['turns_planned']}" for s in summaries.values()],
        "TTFT of resumed turns, p50 (s)": times("ttft_resumed_s", "p50"),
        "TTFT of resumed turns, p99 (s)": times("ttft_resumed_s", "p99"),
        "TTFT of first turns, p50 (s)": times("ttft_first_s", "p50"),
        "TTFT of first turns, p99 (s)": times("ttft_first_s", "p99"),
        "turn latency, p50 (s)": times("turn_latency_s", "p50"),
        "turn latency, p99 (s)": times("turn_latency_s", "p99"),
        "signal round trip, p99 (s)": [
            f"{s['signal_s']['p99']:.4f}" if s["signal_s"] else "" for s in summaries.values()
        ],
        "prompt tokens cached": [_share(s["cached_tokens"], s["prompt_tokens"]) for s in summaries.values()],
        "tokens recomputed": [str(s["recomputed_tokens"] or 0) if s["signal_s"] else "" for s in summaries.values()],
        "seconds": [f"{s['duration_s']:.0f}" for s in summaries.values()],
    }
    head = ["", *summaries]
    lines = [f"KV memory of {SESSIONS} sessions of {TOKENS} tokens, {dtype}; seed {SEED}.", ""]
    lines += [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * len(summaries)}"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()), ""])


def _share(part: int | None, whole: int) -> str:
    """A percentage, or nothing of a server that does not tell."""
    return "" if part is None else f"{part / whole:.0%}"


if __name__ == "__main__":
    sys.exit(main())
