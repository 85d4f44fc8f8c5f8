"""What a hop costs: `python -m benchmarks.hop`. Sessions of one replica are asked for at it and at another one, which
sends the requests on, in pairs of rounds whose order changes. Replicas and clients are processes that share the cores.

Throughput is that of several streams at once. The first token is that of a short prompt on an idle replica. A small
request reads a session. `hop` in each is the cost: the difference or the ratio of each pair.
"""

import argparse
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx

from benchmarks.command import bind_to_cores
from benchmarks.spread import middle_half
from loadgen.processes.process import free_port
from loadgen.processes.processor import NO_FLAGS, processor_flags
from loadgen.report.figures import Figure, Target
from loadgen.report.tables import figure_table, to_markdown

REPLICA = re.compile(r"Djinn serves .+ on (http://\S+)")
PROMPT = list(range(1, 17))
SMALL = 100
"""Small requests of a round."""
PLACES = ("straight", "over a hop")
SHARE, FIRST_MS = Target(0.95, at_least=True), Target(1.5)


@contextmanager
def running(ready: re.Pattern[str], *arguments: str) -> Iterator[str]:
    """A `djinn` with these arguments; yields the URL that it prints."""
    command = [sys.executable, "-P", "-m", "app", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            found = next(filter(None, map(ready.match, process.stdout)), None)
            if found is None:
                raise SystemExit("djinn did not start")
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)


def streamed(http: httpx.Client, tokens: int, begun: threading.Barrier | None = None) -> tuple[float, float]:
    """One streamed turn in a session of its own: seconds to its first token, and to its end."""
    session = http.post("/v1/sessions", json={}).raise_for_status().json()["id"]
    body = {"token_ids": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    if begun is not None:
        begun.wait()
    start = time.perf_counter()
    with http.stream("POST", f"/v1/sessions/{session}/generate", json=body) as answer:
        parts = answer.raise_for_status().iter_raw()
        next(parts)
        first_s = time.perf_counter() - start
        for _ in parts:
            pass
    end_s = time.perf_counter() - start
    http.delete(f"/v1/sessions/{session}").raise_for_status()
    return first_s, end_s


def first_ms(http: httpx.Client) -> float:
    """Milliseconds to the first token, with nothing else under way."""
    return 1e3 * streamed(http, 1)[0]


def small_ms(http: httpx.Client) -> float:
    """Milliseconds of a small request on a connection that is open."""
    session = http.post("/v1/sessions", json={}).raise_for_status().json()["id"]
    start = time.perf_counter()
    for _ in range(SMALL):
        http.get(f"/v1/sessions/{session}").raise_for_status()
    spent_s = time.perf_counter() - start
    http.delete(f"/v1/sessions/{session}").raise_for_status()
    return 1e3 * spent_s / SMALL


def tokens_per_s(width: int, tokens: int, http: httpx.Client) -> float:
    """Tokens of `width` streams at once, for each second until the last one ends."""
    begun = threading.Barrier(width)
    with ThreadPoolExecutor(width) as pool:
        ends = [each[1] for each in pool.map(lambda _: streamed(http, tokens, begun), range(width))]
    return width * tokens / max(ends)


def pairs(ways: list[httpx.Client], rounds: int, measure: Callable[[httpx.Client], float]) -> list[list[float]]:
    """What `measure` finds each way, round by round; a first round is for caches."""
    found: list[list[float]] = [[] for _ in ways]
    for number in range(-1, rounds):
        for place in (0, 1) if number % 2 else (1, 0):
            value = measure(ways[place])
            if number >= 0:
                found[place].append(value)
    return found


def measure(ways: list[httpx.Client], rounds: int, widths: list[int], tokens: int) -> Iterator[Figure]:
    """All lines of the table."""
    for label, times, target in (
        ("small request", partial(pairs, ways, rounds, small_ms), None),
        ("first token", partial(pairs, ways, rounds, first_ms), FIRST_MS),
    ):
        straight, through = times()
        for name, found in zip(PLACES, (straight, through), strict=True):
            yield Figure(f"{label}, {name}", "ms", middle_half(found))
        costs = [slow - fast for fast, slow in zip(straight, through, strict=True)]
        yield Figure(f"{label}, hop", "ms", middle_half(costs), target)
    for width in widths:
        straight, through = pairs(ways, rounds, partial(tokens_per_s, width, tokens))
        label = f"{width} stream{'s' * (width > 1)}"
        for name, found in zip(PLACES, (straight, through), strict=True):
            yield Figure(f"{label}, {name}", "tok/s", middle_half(found))
        shares = [slow / fast for fast, slow in zip(straight, through, strict=True)]
        yield Figure(f"{label}, hop", "×", middle_half(shares), SHARE)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.hop", description=__doc__)
    parser.add_argument("--model", default="random:tiny-llama", help="default random:tiny-llama, whose steps are short")
    parser.add_argument("--rounds", type=int, default=20, help="of each pair; default 20")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="at once; default 1 8 32")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream; default 128")
    parser.add_argument("--cores", type=int, default=2, help="default 2")
    options = parser.parse_args()
    bind_to_cores(options.cores)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "key").write_text(secrets.token_hex(32))
        common = ["--model", options.model, "--kv-device", "256MiB", "--kv-host", "256MiB"]
        common += ["--cluster", f"folder:{folder}", "--cluster-key-file", str(folder / "key")]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        ways = []
        for name, role in (("a", "both"), ("b", "prefill")):  # no session is placed at the second
            flags = ("--replica", name, "--role", role, "--port", f"{free_port()}", "--state-dir", str(folder / name))
            url = stack.enter_context(running(REPLICA, "serve", *flags, *common))
            ways.append(stack.enter_context(httpx.Client(base_url=url, timeout=300, limits=limits)))
        while "missing" in ways[1].get("/v1/sessions").json() or "a" not in ways[1].post("/v1/sessions").json()["id"]:
            time.sleep(0.1)
        figures = list(measure(ways, options.rounds, options.streams, options.tokens))
    title = f"A hop: {options.model}, {' '.join(processor_flags()) or NO_FLAGS}"
    print(to_markdown(figure_table(title, figures)))


if __name__ == "__main__":
    main()
