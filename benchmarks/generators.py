"""`python -m benchmarks.generators`: the load generator and GuideLLM in alternating rounds on the same Djinn server.

GuideLLM lives in a virtual environment of its own: its pins must not meet Djinn's.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import orjson
from rich.console import Console

from benchmarks.command import bind_to_cores, exit_status, make_parser
from benchmarks.cpu_meter import DISTURBED_SHARE, CpuMeter, session_cpu_s
from benchmarks.record import Run, write_run
from loadgen.experiments.density.rows import TURNS
from loadgen.load.arrivals import Arrivals, arrival_times
from loadgen.load.trace import AgentPlan, Trace, TurnPlan, write_trace
from loadgen.options.common import EXIT_FAILED
from loadgen.peers.base import SERVED_NAME, ServerSettings
from loadgen.peers.djinn import DjinnPeer
from loadgen.peers.dtypes import AUTO, CHOICES
from loadgen.processes.environment import TORCH, Environment, has_stamp, write_stamp
from loadgen.processes.folders import peers_folder
from loadgen.processes.launch import ROOT, Launch, without_folders
from loadgen.processes.process import ServerFailedError, free_port, log_tail, running_server, spawn, stop_server
from loadgen.report.figures import Figure, Spread
from loadgen.report.origin import machine
from loadgen.report.report import Report, read_report
from loadgen.report.tables import Table, to_markdown, to_rich

DJINN = DjinnPeer("djinn", "signal")
GUIDELLM, VERSION = "guidellm", "0.8.1"
PACKAGES = (GUIDELLM, "httpx", "torch", "transformers")
TOLERANCE = 0.10
"""How far the generators may be apart."""
PROMPT_TOLERANCE, CACHED_TOLERANCE = 0.02, 0.05
MAX_TRIES, TIMEOUT_S = 6, 600.0
LOST_AFTER_S = 1.0
"""When the row that is lost is due, after the one before: late enough to disturb no other."""
FIGURES = {"ttft_p50_s": "TTFT, median (s)", "ttft_mean_s": "TTFT, mean (s)", "tokens_per_s": "Output (tokens/s)"}
DEFINITIONS = f"""\
Both generators send the same requests at the same times to `/v1/completions`: so many tokens of prompt, greedy,
streamed, `ignore_eos`. Texts are the generators' own, other ones in every run, so that the server's prefix cache helps
neither. Two loads: `steady`, which the server keeps up with, and `burst`, which is more than it can do at once.

- **TTFT** is the time to the first chunk with text. Both clocks start when the first bytes of the request
  are written.
- **Output** is completion tokens divided by the time from the first request to the end of the last. GuideLLM's window
  begins when it has sent the first request, ours when that request is due.
- Medians are of an odd number of requests: of an even number GuideLLM takes the lower neighbour, loadgen the middle.
- GuideLLM runs one worker process instead of its ten, because they share the server's cores; it asks for the usage in
  every chunk, and sends text that the server tokenizes; loadgen sends token ids.
- GuideLLM mostly loses its last answer: its scheduler ends on a timeout that falls between the note that all is done
  and the answer itself. It is given one request more, a second after the others, to lose. A pair of runs in which one
  measured another load than was asked for is measured again.
- The ratio is ours to GuideLLM's, the median over rounds of each round's. They agree within {TOLERANCE:.0%}.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` prompts of `prompt_tokens`, each for exactly `completion_tokens`, that arrive as a Poisson process of
    `rate` per second; at infinite rate all at once.
    """

    name: str
    requests: int
    rate: float
    prompt_tokens: int
    completion_tokens: int

    def trace(self, seed: int) -> Trace:
        """One agent with one turn for each request. The first arrives at once, so that no generator's clock runs
        before there is work.
        """
        turns = (TurnPlan(self.prompt_tokens, self.completion_tokens, think_s=None, announced_s=None, tool=False),)
        times = arrival_times(Arrivals.POISSON, self.requests, self.rate, 1.0, np.random.default_rng(seed))
        return tuple(AgentPlan(arrival_s - times[0], turns) for arrival_s in times)

    def __str__(self) -> str:
        arrivals = "all at once" if self.rate == inf else f"{self.rate:g} per second"
        lengths = f"{self.prompt_tokens} prompt and {self.completion_tokens} completion tokens each"
        return f"{self.name}: {self.requests} requests, {arrivals}, {lengths}"


FULL = (Load("steady", 41, 1.5, 192, 32), Load("burst", 31, inf, 192, 64))
"""A server that keeps up, for what a user waits; and one that has more than it can do, for what it can. Odd numbers of
requests: the two generators define the median of an even number differently.
"""
QUICK = (Load("steady", 7, 2.0, 64, 16), Load("burst", 7, inf, 64, 16))


class OtherLoadError(Exception):
    """What a generator measured is not the load that was asked for: its figures cannot be compared."""


@dataclass(frozen=True, slots=True)
class Measured:
    """In terms that mean the same for both. Token counts are the server's own, over all requests that completed.

    TTFT is from the sending of a request to the first chunk with text. `tokens_per_s` counts completion tokens from the
    sending of the first request to the end of the last. `latest_s` is how long after its arrival the latest request was
    sent.
    """

    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_p50_s: float
    ttft_mean_s: float
    tokens_per_s: float
    latest_s: float

    def check(self, generator: str, load: Load) -> None:
        """Raises OtherLoadError if this was another load. A generator that sends text gets the lengths of its prompts
        right only nearly, and what the server knows already it need not compute.
        """
        wanted = self.requests * load.prompt_tokens
        faults = {
            f"{self.requests} of {load.requests} requests completed": self.requests != load.requests,
            f"{self.completion_tokens} completion tokens": (
                self.completion_tokens != self.requests * load.completion_tokens
            ),
            f"{self.prompt_tokens} prompt tokens instead of {wanted}": (
                abs(self.prompt_tokens - wanted) > PROMPT_TOLERANCE * wanted
            ),
            f"{self.cached_tokens} prompt tokens from the prefix cache": (
                self.cached_tokens > CACHED_TOLERANCE * wanted
            ),
        }
        if any(faults.values()):
            told = "; ".join(fault for fault, is_there in faults.items() if is_there)
            raise OtherLoadError(f"{generator}, {load.name}: {told}")


@dataclass(frozen=True, slots=True)
class Round:
    """Both generators with the same arrivals, one right after the other.

    `first` is the name of the one that began; `other_cpu_share` what processes outside the benchmark had of the cores.
    """

    number: int
    load: str
    seed: int
    first: str
    own: Measured
    rival: Measured
    other_cpu_share: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure under one load: the median over rounds, with the lowest and the highest. `ratio` is that of the ratios
    of each round, ours to theirs: what slows the machine down for a while slows down both.
    """

    load: str
    figure: str
    own: Spread
    rival: Spread
    ratio: Spread

    @property
    def agrees(self) -> bool:
        """Whether the two are at most `TOLERANCE` apart."""
        return abs(self.ratio.median - 1.0) <= TOLERANCE


def compare(rounds: Sequence[Round]) -> list[Comparison]:
    """Every figure under every load, loads in order of appearance."""
    found = []
    for load in dict.fromkeys(entry.load for entry in rounds):
        of_load = [entry for entry in rounds if entry.load == load]
        for figure in FIGURES:
            own: list[float] = [getattr(entry.own, figure) for entry in of_load]
            rival: list[float] = [getattr(entry.rival, figure) for entry in of_load]
            ratios = [ours / theirs for ours, theirs in zip(own, rival, strict=True)]
            found.append(Comparison(load, figure, *map(Spread.over, (own, rival, ratios))))
    return found


def run_program(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
    """Runs a generator in `folder`, silently; whatever processes it started are gone at the end.

    Raises ServerFailedError, with the end of what it said, if it fails or takes longer than `TIMEOUT_S`.
    """
    with tempfile.TemporaryFile() as output:
        process = spawn(command, environment or {}, output, folder)
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ServerFailedError(f"{command[0]} took longer than {TIMEOUT_S:.0f} s\n{log_tail(output)}") from error
        finally:
            stop_server(process.pid)
            process.wait()
        if status:
            raise ServerFailedError(f"{' '.join(command)} ended with status {status}\n{log_tail(output)}")


def run_own(url: str, _tokenizer: Path, load: Load, seed: int, folder: Path) -> Measured:
    """The load generator under test, which replays the load's trace with texts of its own."""
    write_trace(load.trace(seed), folder / "trace.jsonl")
    options = ["--target", f"djinn={url}#{SERVED_NAME}", "--trace", "trace.jsonl", "--seed", str(seed), "--output", "."]
    alone = ["--system-tokens", "0", "--signals", "none"]
    run_program([sys.executable, "-m", "loadgen", "density", *options, *alone], folder)
    [file] = folder.glob("density-*.json")
    return read_own(read_report(file, "density"))


def read_own(report: Report) -> Measured:
    """Its window begins with the run, when the first agent arrives, and ends with the last turn."""
    turns = [row for row in report.rows(TURNS) if row.get("error") is None]
    if not turns:
        raise ServerFailedError("loadgen completed no turn")
    first_s = [row["ttft_s"] for row in turns]
    completion = sum(row["completion_tokens"] for row in turns)
    return Measured(
        requests=len(turns),
        prompt_tokens=sum(row["prompt_tokens"] for row in turns),
        completion_tokens=completion,
        cached_tokens=sum(row["cached_tokens"] or 0 for row in turns),
        ttft_p50_s=median(first_s),
        ttft_mean_s=fmean(first_s),
        tokens_per_s=completion / max(row["sent_s"] + row["latency_s"] for row in turns),
        latest_s=max(row["sent_s"] - row["due_s"] for row in turns),
    )


def guidellm_environment() -> Environment:
    """Where GuideLLM is, or will be."""
    return Environment(peers_folder() / GUIDELLM)


def ensure_guidellm(environment: Environment) -> None:
    """Make the environment unless it is complete. Raises LoadgenError where pip fails."""
    if has_stamp(environment.folder, VERSION):
        return
    environment.make()
    # First, and named again: GuideLLM alone would bring the CUDA build along, for its data loader.
    environment.pip("install", TORCH)
    environment.pip("install", TORCH, f"{GUIDELLM}=={VERSION}")
    write_stamp(environment.folder, VERSION)


def run_guidellm(url: str, tokenizer: Path, load: Load, seed: int, folder: Path) -> Measured:
    """GuideLLM replays the load's arrivals; its prompts are made up of random words. One worker process instead of ten:
    they share the server's cores. Nothing is fetched, nothing is kept.

    It gets one request more to lose: in replay GuideLLM 0.8 mostly ends without the last row's answer. A run in which
    it does not is of another load, and is discarded.
    """
    lengths = {"input_length": load.prompt_tokens, "output_length": load.completion_tokens}
    times = [agent.arrival_s for agent in load.trace(seed)]
    arrivals, scenario, report = (folder / name for name in ("arrivals.jsonl", "scenario.json", "report.json"))
    rows = ({"timestamp": arrival_s, **lengths} for arrival_s in (*times, times[-1] + LOST_AFTER_S))
    arrivals.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    spec = {
        "backend": {
            "kind": "openai_http",
            "target": url,
            "model": SERVED_NAME,
            "request_format": "/v1/completions",
            "extras": {"body": {"temperature": 0}},
        },
        "profile": {"kind": "replay", "schedule_turn": "timestamp"},
        "tokenizer": {"kind": "huggingface_auto", "model": str(tokenizer)},
        "data": [{"kind": "trace_synthetic", "source": {"kind": "json_file", "path": str(arrivals)}}],
        "seed": {"kind": "static", "value": seed},
        "outputs": [{"kind": "json", "path": str(report)}],
    }
    scenario.write_bytes(orjson.dumps({"spec": spec}))
    program = guidellm_environment().folder / "bin" / GUIDELLM
    variables = {
        "GUIDELLM__MAX_WORKER_PROCESSES": "1",
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    run_program([str(program), "run", "--config", str(scenario), "--disable-console"], folder, variables)
    return read_guidellm(report.read_bytes())


def read_guidellm(text: bytes) -> Measured:
    """Its window begins when the first request is sent and ends with the last answer. Raises LookupError, TypeError for
    another version's report.
    """
    [benchmark] = orjson.loads(text)["benchmarks"]
    metrics: Mapping[str, Any] = benchmark["metrics"]

    def of(name: str) -> Mapping[str, float]:
        found: Mapping[str, float] = metrics[name]["successful"]
        return found

    delay = metrics["root_dispatch_delay"]
    return Measured(
        requests=metrics["request_totals"]["successful"],
        prompt_tokens=round(of("prompt_token_count")["total_sum"]),
        completion_tokens=round(of("output_token_count")["total_sum"]),
        cached_tokens=sum(each.get("cached_tokens") or 0 for each in benchmark["requests"]["successful"]),
        ttft_p50_s=of("time_to_first_token_ms")["median"] / 1000,
        ttft_mean_s=of("time_to_first_token_ms")["mean"] / 1000,
        tokens_per_s=of("output_tokens_per_second")["mean"],
        latest_s=0.0 if delay is None else delay["max"],
    )


GENERATORS: dict[str, Callable[[str, Path, Load, int, Path], Measured]] = {"loadgen": run_own, "GuideLLM": run_guidellm}


@dataclass(slots=True)
class Rounds:
    """Measures with both generators on the server of the POSIX session `server`, all bound to `cores`. Every run has a
    seed of its own: no text is ever sent again, so that the server's prefix cache helps nobody.
    """

    url: str
    tokenizer: Path
    server: int
    cores: list[int]
    say: Callable[[str], None]
    seeds: count[int] = field(default_factory=count)
    discarded: list[str] = field(default_factory=list)
    """Why pairs of runs were measured again."""

    def warm_up(self, load: Load) -> None:
        """What is slow only once stays out of the measurement. Raises ServerFailedError."""
        self._measure("loadgen", load, next(self.seeds))

    def run(self, number: int, load: Load) -> Round:
        """The generators take turns at going first.

        Raises ServerFailedError if a generator fails, or again and again measures another load.
        """
        for _ in range(MAX_TRIES):
            order = list(GENERATORS) if number % 2 == 0 else list(GENERATORS)[::-1]
            meter, seed = CpuMeter(self.cores, lambda: _ended_cpu_s() + session_cpu_s(self.server)), next(self.seeds)
            measured = {name: self._measure(name, load, seed) for name in order}
            try:
                for name in order:
                    measured[name].check(name, load)
            except OtherLoadError as error:
                self.say(f"measured again: {error}")
                self.discarded.append(str(error))
                continue
            own, rival = (measured[name] for name in GENERATORS)
            return Round(number, load.name, seed, order[0], own, rival, meter.other_share())
        raise ServerFailedError(f"{load.name}: no comparable pair of runs in {MAX_TRIES} tries")

    def _measure(self, name: str, load: Load, seed: int) -> Measured:
        with tempfile.TemporaryDirectory() as folder:
            return GENERATORS[name](self.url, self.tokenizer, load, seed, Path(folder))


def _ended_cpu_s() -> float:
    """CPU seconds of this process and of all that it started and that has ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorsRun(Run):
    """Everything that goes into the JSON. rival_versions: by package."""

    rival_versions: dict[str, str]
    launch: Launch
    loads: tuple[Load, ...]
    rounds: list[Round]
    comparisons: list[Comparison]
    discarded: list[str]

    def markdown(self) -> str:
        """The tables, and what their words mean."""
        late = [max(each.latest_s for each in of) for of in zip(*((r.own, r.rival) for r in self.rounds), strict=True)]
        others = max(entry.other_cpu_share for entry in self.rounds)
        rounds = 1 + max(entry.number for entry in self.rounds)
        lines = [
            f"# Two load generators on {self.model}, {self.place_and_time}",
            "",
            DEFINITIONS,
            *(f"- {load}" for load in self.loads),
            "",
            f"Rounds: {rounds}. Figures are medians over rounds [lowest, highest].",
            f"Of the cores, processes outside the benchmark had at most {others:.1%}.",
            f"Requests were sent at most {late[0]:.3f} s late by loadgen, {late[1]:.3f} s by GuideLLM.",
            *(f"Measured again: {reason}." for reason in self.discarded),
            "",
        ]
        return "\n".join([*lines, to_markdown(comparison_table(self.comparisons))])


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Medians over rounds [lowest, highest]."""
    rows = [
        {
            "": f"{entry.load}: {FIGURES[entry.figure]}",
            **{n: Figure("", "", of).value for n, of in zip(GENERATORS, (entry.own, entry.rival), strict=True)},
            "ratio": Figure("", "×", entry.ratio).value,
            "agree": "yes" if entry.agrees else "NO",
        }
        for entry in comparisons
    ]
    return Table("loadgen beside GuideLLM", rows)


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
    cores, environment = bind_to_cores(arguments.cores), guidellm_environment()
    with console.status("GuideLLM's environment: a minute or two the first time"):
        ensure_guidellm(environment)
    loads, rounds = (QUICK, 1) if arguments.quick else (FULL, arguments.rounds)
    port = free_port()
    launch = DJINN.launch(ServerSettings(arguments.model, arguments.dtype, cores=tuple(cores)), port)
    url, found = f"http://127.0.0.1:{port}", list[Round]()
    with running_server(launch.command, launch.environment, url) as server:
        runner = Rounds(url, arguments.model.resolve(), server, cores, console.print)
        for load in loads:
            runner.warm_up(load)
        for number in range(rounds):
            for load in loads:
                with console.status(f"round {number + 1} of {rounds}: {load.name}"):
                    found.append(runner.run(number, load))
                if (share := found[-1].other_cpu_share) > DISTURBED_SHARE:
                    console.print(
                        f"disturbed: other processes had {share:.0%} of the cores ({load.name}, {number + 1})"
                    )
    run = GeneratorsRun(
        model=arguments.model.name,
        rival_versions={name: environment.find(name).version for name in PACKAGES},
        launch=without_folders(launch, [ROOT, arguments.model.parent]),
        loads=loads,
        rounds=found,
        comparisons=compare(found),
        discarded=runner.discarded,
    )
    console.print(f"on {machine()}", highlight=False)
    console.print(to_rich([comparison_table(run.comparisons)]))
    if not arguments.quick:
        console.print(f"written: {write_run(arguments.output, 'generators-', run, run.markdown())}")
    return run.comparisons


if __name__ == "__main__":
    sys.exit(main())
