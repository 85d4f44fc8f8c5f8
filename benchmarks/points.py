"""What it costs to look inside layers, and whom: `python -m benchmarks.points`, some minutes, less with --quick.

- Attention patterns of 8 heads and all queries of 1,024 tokens, as the engine computes and keeps them, beside zeros
  written to as much new memory, which is the least that this can take.
- A sweep of patches over all layers and positions of a pair of 15 tokens, and what it does to clients that decode.
- The lens over all layers, asked for as the page does, while clients decode, and what it does to them.
- Activations of many prompts at all layers, over the same prompts as completions of one token.

Ways take turns, and ratios are those of each pair. CPU time is that of all of the server's processes: where others use
the machine, it says more than the clock.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any

import httpx
import torch
from rich.console import Console

from app.gpu.device.hardware import zeroed
from app.gpu.kernels.attention import attention_pattern
from app.gpu.kernels.attention.base import AttentionSpec
from benchmarks.command import bind_to_cores, exit_status, make_parser
from benchmarks.measuring import middle_half
from benchmarks.record import Run, write_run
from benchmarks.replicas import open_session, random_prompt
from loadgen.peers.base import SERVED_NAME
from loadgen.peers.djinn import djinn_launch
from loadgen.processes.process import free_port, running_server
from loadgen.report.tables import Figure, Target, figure_table, to_markdown, to_rich
from loadgen.sampling.sampler import process_use

HEADS, KV_HEADS, CHOSEN, TOKENS, HEAD_DIM, BLOCK = 9, 3, 8, 1024, 64, 16
PART = 64
"""Queries that the engine captures at once of a prompt, while others may come."""
PAIR, CLIENTS = 15, 4
LENS_POSITIONS, LENS_ROWS, LENS_LOOKS = 64, 8, 5
"""Tokens of the session that is looked at, positions that are looked at while clients decode, and looks in a round."""
AT_ONCE = 16
"""Completions of the baseline: more than a step takes, so that the engine never waits for one."""
TARGETS = {
    "pattern": Target(5.0),
    "sweep": Target(20.0),
    "beside": Target(1.2),
    "first_row": Target(0.5),
    "beside_lens": Target(1.1),
    "bulk": Target(0.8, at_least=True),
}
PARTS = ("pattern", "sweep", "lens", "bulk")


@dataclass(frozen=True, slots=True, kw_only=True)
class PointsRun(Run):
    """All figures: nothing else is kept of a run."""

    figures: list[Figure]


def patterns(rounds: int) -> Iterator[Figure]:
    """The kernel in this process, on as many threads as the engine has."""
    torch.manual_seed(0)
    blocks = TOKENS // BLOCK
    kv = torch.randn(blocks, 2, KV_HEADS, BLOCK, HEAD_DIM)
    query, table = torch.randn(TOKENS, HEADS, HEAD_DIM), torch.randperm(blocks, dtype=torch.int32)
    spec = AttentionSpec(scale=HEAD_DIM**-0.5)

    def of(positions: range) -> Callable[[], object]:
        own = query[positions.start : positions.stop]
        return lambda: attention_pattern(own, kv, table, positions, spec, range(CHOSEN))

    parts = [of(range(first, first + PART)) for first in range(0, TOKENS, PART)]
    ways: dict[str, Callable[[], object]] = {
        f"Patterns of {CHOSEN} heads over {TOKENS} tokens": of(range(TOKENS)),
        f"The same in parts of {PART}": lambda: [each() for each in parts],
        "The same of the last query": of(range(TOKENS - 1, TOKENS)),
        "Zeros to as much new memory": lambda: zeroed((TOKENS, CHOSEN, TOKENS), torch.float32, query.device).zero_(),
    }
    wall, cpu = ({name: list[float]() for name in ways} for _ in range(2))
    for number in range(rounds + 1):
        for name, run in ways.items():
            began, used = time.perf_counter(), time.process_time()
            kept = run()
            if number:
                wall[name].append(1e3 * (time.perf_counter() - began))
                cpu[name].append(1e3 * (time.process_time() - used))
            del kept
    for index, name in enumerate(ways):
        yield Figure(name, "ms", middle_half(wall[name]), None if index else TARGETS["pattern"])
        yield Figure(f"{name}: CPU time", "ms", middle_half(cpu[name]))


@contextmanager
def served(model: Path) -> Iterator[tuple[httpx.Client, Callable[[], float]]]:
    """A fresh server: a client, and what tells the CPU seconds that its processes have used."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        flags = {"--model": str(model), "--served-model-name": SERVED_NAME, "--port": str(port)}
        flags |= {"--state-dir": folder, "--kv-device": "512MiB"}
        launch = djinn_launch(flags)
        with (
            running_server(launch.command, launch.environment, url) as pid,
            httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as http,
        ):
            yield http, lambda: cpu_seconds(pid)


def cpu_seconds(pid: int) -> float:
    """Of a server's processes until now."""
    use = process_use(pid)
    assert use is not None
    return use.cpu_s


def sweep(http: httpx.Client, random: Random) -> float:
    """Seconds of a sweep over all layers and positions: the prompts differ from their first token on."""
    clean, corrupted = (random_prompt(random, PAIR) for _ in range(2))
    body = {"clean": clean, "corrupted": corrupted, "metric": {"answer": 100, "wrong": 200}}
    began = time.perf_counter()
    found = http.post("/v1/experiments/patching", json=body).raise_for_status().json()
    assert len(found["tables"][0]["columns"]) == PAIR
    return time.perf_counter() - began


def streamed(http: httpx.Client, random: Random, stopped: threading.Event) -> list[float]:
    """When the tokens of a client came that has one turn after the other until it is stopped."""
    times = list[float]()
    while not stopped.is_set():
        body = {
            "model": SERVED_NAME,
            "prompt": random_prompt(random, 32),
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
        }
        with http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.raise_for_status().iter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
                if stopped.is_set():
                    break
    return times


def beside(http: httpx.Client, random: Random, works: Iterable[Callable[[], object]]) -> list[list[float]]:
    """The times between two tokens of the same clients beside each work, one after the other."""
    stopped, sizes = threading.Event(), [random.randrange(1 << 30) for _ in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(streamed, http, Random(seed), stopped) for seed in sizes]
        try:
            time.sleep(1.0)
            ends = [time.perf_counter()]
            for work in works:
                work()
                ends.append(time.perf_counter())
        finally:
            stopped.set()  # clients ask again and again until then
        gaps = [each for client in clients for each in pairwise(client.result())]
    return [[b - a for a, b in gaps if first <= a and b <= last] for first, last in pairwise(ends)]


def shares(found: Iterable[list[list[float]]], beside_what: str, target: Target) -> Iterator[Figure]:
    """Of each list of times, alternately without and with it: median and 95th percentile with it over those without."""
    cuts = [[quantiles(chain(*parts[with_it::2]), n=20) for with_it in (0, 1)] for parts in found]
    for share, cut, limit in (("p50", 9, None), ("p95", 18, target)):
        ratios = [after[cut] / before[cut] for before, after in cuts]
        yield Figure(
            f"Time per token of clients beside {beside_what} / without it, {share}", "×", middle_half(ratios), limit
        )


def sweeps(http: httpx.Client, cpu_s: Callable[[], float], rounds: int) -> Iterator[Figure]:
    """Alone, and beside clients."""
    random = Random(3)
    sweep(http, random)
    alone, used = list[float](), list[float]()
    for _ in range(rounds):
        before = cpu_s()
        alone.append(sweep(http, random))
        used.append(cpu_s() - before)
    yield Figure(f"Sweep of {PAIR} positions at all layers", "s", middle_half(alone), TARGETS["sweep"])
    yield Figure("The same: CPU time", "s", middle_half(used))
    seconds, gaps = list[float](), list[list[list[float]]]()
    for _ in range(max(2, rounds // 2)):  # a sweep has a tenth of the time then, and takes ten times as long
        gaps.append(beside(http, random, [lambda: time.sleep(8.0), lambda: seconds.append(sweep(http, random))]))
    yield Figure(f"Sweep beside {CLIENTS} clients that decode", "s", middle_half(seconds))
    yield from shares(gaps, "the sweep", TARGETS["beside"])


def lenses(http: httpx.Client, random: Random, rounds: int) -> Iterator[Figure]:
    """One position after the other, the last first: that of which the page draws a column as soon as it is there."""
    layers: int = http.get("/version").raise_for_status().json()["num_layers"]
    rows = [list[float](), list[float]()]

    def look() -> None:
        session = open_session(http)
        captured = {"layers": list(range(layers)), "action": "capture"}
        http.post(f"{session}/breakpoints", json=captured).raise_for_status()
        prompt = random_prompt(random, LENS_POSITIONS)
        http.post(f"{session}/generate", json={"token_ids": prompt, "max_tokens": 0}).raise_for_status()
        times = [time.perf_counter()]
        for at in range(LENS_POSITIONS, LENS_POSITIONS - LENS_ROWS, -1):
            found = http.get(f"{session}/lens", params={"positions": f"{at - 1}:{at}"}).raise_for_status().json()
            assert [len(each["token_ids"][0]) for each in found["layers"]] == [1] * layers
            times.append(time.perf_counter())
        http.delete(session).raise_for_status()
        rows[0].append(times[1] - times[0])
        rows[1] += [b - a for a, b in pairwise(times[1:])]

    # A step takes longer late in a turn than early: what is compared alternates within the same turns.
    works: tuple[Callable[[], object], ...] = (lambda: time.sleep(4.0), look)
    gaps = [beside(http, random, works * LENS_LOOKS) for _ in range(rounds)]
    yield Figure(f"First position of a lens over {layers} layers", "s", middle_half(rows[0]), TARGETS["first_row"])
    yield Figure("Each further one", "s", middle_half(rows[1]))
    yield from shares(gaps, "the lens", TARGETS["beside_lens"])


def bulk(http: httpx.Client, cpu_s: Callable[[], float], rounds: int, prompts: int) -> Iterator[Figure]:
    """Jobs over files, of short prompts and of longer ones."""
    random = Random(5)

    def captured(token_ids: list[list[int]]) -> float:
        content = "\n".join(json.dumps({"prompt": each}) for each in token_ids)
        sent = http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "user_data"})
        began = time.perf_counter()
        job = (
            http.post("/v1/experiments/activations", json={"input_file_id": sent.json()["id"]})
            .raise_for_status()
            .json()
        )
        while job["status"] not in ("completed", "failed", "cancelled"):
            time.sleep(0.2)  # each poll takes the server some ms
            job = http.get(f"/v1/experiments/activations/{job['id']}").json()
        spent = time.perf_counter() - began
        assert job["prompt_counts"]["completed"] == len(token_ids), job
        for shard in job["shards"]:
            http.delete(f"/v1/files/{shard['file_id']}").raise_for_status()
        return spent

    def plain(token_ids: list[list[int]]) -> float:
        def complete(each: list[int]) -> None:
            body = {"model": SERVED_NAME, "prompt": each, "max_tokens": 1}
            http.post("/v1/completions", json=body).raise_for_status()

        began, pool = time.perf_counter(), ThreadPoolExecutor(AT_ONCE)
        try:
            list(pool.map(complete, token_ids))
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupted run does not ask for the rest
        return time.perf_counter() - began

    for length in (32, 128, 512):
        shares, rates, costs = list[float](), list[float](), list[float]()
        for number in range(-1, rounds):
            found, used = dict[Any, float](), dict[Any, float]()
            for way in (captured, plain) if number % 2 else (plain, captured):
                token_ids = [random_prompt(random, length) for _ in range(max(16, prompts * 32 // length))]
                before = cpu_s()
                found[way] = way(token_ids) / len(token_ids)
                used[way] = (cpu_s() - before) / len(token_ids)
            if number >= 0:
                shares.append(found[plain] / found[captured])
                rates.append(length / found[captured])
                costs.append(used[plain] / used[captured])
        yield Figure(f"Activations at all layers, prompts of {length}", "tok/s", middle_half(rates))
        yield Figure(f"The same / completions, prompts of {length}", "×", middle_half(shares), TARGETS["bulk"])
        yield Figure(f"The same by CPU time, prompts of {length}", "×", middle_half(costs))


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    """The parts that are asked for."""
    rounds = 2 if arguments.quick else arguments.rounds
    if "pattern" in arguments.only:
        with torch.inference_mode():
            yield from patterns(10 * rounds)
    if {"sweep", "lens", "bulk"} & set(arguments.only):
        with served(arguments.model) as (http, cpu_s):
            if "sweep" in arguments.only:
                yield from sweeps(http, cpu_s, rounds)
            if "lens" in arguments.only:
                yield from lenses(http, Random(7), rounds)
            if "bulk" in arguments.only:
                yield from bulk(http, cpu_s, rounds, 64 if arguments.quick else 256)


def main() -> int:
    """Run it as the command line asks; returns the process's exit status."""
    parser = make_parser("python -m benchmarks.points", __doc__)
    parser.add_argument("--rounds", type=int, choices=range(2, 101), default=5, metavar="2..100", help="default 5")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default all")
    arguments = parser.parse_args()
    return exit_status(arguments.model, lambda: _run(arguments, Console()))


def _run(arguments: argparse.Namespace, console: Console) -> None:
    torch.set_num_threads(len(bind_to_cores(arguments.cores)))
    with console.status("measuring"):
        figures = list(measure(arguments))
    run = PointsRun(model=arguments.model.name, figures=figures)
    table = figure_table("Inside layers", figures)
    console.print(to_rich([table]))
    if not arguments.quick:
        heading = f"# Looking inside layers: {run.model} on {run.place_and_time}\n\n"
        console.print(f"written: {write_run(arguments.output, 'points-', run, heading + to_markdown(table))}")


if __name__ == "__main__":
    sys.exit(main())
