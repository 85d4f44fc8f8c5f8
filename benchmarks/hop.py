"""What a hop costs: `python -m benchmarks.hop`. Sessions of one replica are asked for at it and at another one, which
sends the requests on, in pairs of rounds whose order changes. Replicas and clients are processes that share the cores.

Throughput is that of several streams at once. The first token is that of a short prompt on an idle replica. `hop`
in each is the cost: the difference or the ratio of each pair.
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx

from benchmarks.command import bind_to_cores
from benchmarks.measuring import middle_half
from benchmarks.replicas import greedy, open_session, replicas
from loadgen.processes.launch import NO_FLAGS, processor_flags
from loadgen.report.tables import Figure, Target, figure_table, to_markdown

PROMPT = list(range(1, 17))
PLACES = ("straight", "over a hop")
ROLES = {"a": "both", "b": "prefill"}
"""No session is placed at the second."""
SHARE, FIRST_MS = Target(0.95, at_least=True), Target(1.5)


def streamed(http: httpx.Client, tokens: int, begun: threading.Barrier | None = None) -> tuple[float, float]:
    """One streamed turn in a session of its own: seconds to its first token, and to its end."""
    session = open_session(http)
    if begun is not None:
        begun.wait()
    start = time.perf_counter()
    with http.stream("POST", f"{session}/generate", json={**greedy(PROMPT, tokens), "stream": True}) as answer:
        parts = answer.raise_for_status().iter_raw()
        next(parts)
        first_s = time.perf_counter() - start
        for _ in parts:
            pass
    end_s = time.perf_counter() - start
    http.delete(session).raise_for_status()
    return first_s, end_s


def first_ms(http: httpx.Client) -> float:
    """Milliseconds to the first token, with nothing else under way."""
    return 1e3 * streamed(http, 1)[0]


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
    straight, through = pairs(ways, rounds, first_ms)
    for name, found in zip(PLACES, (straight, through), strict=True):
        yield Figure(f"first token, {name}", "ms", middle_half(found))
    costs = [slow - fast for fast, slow in zip(straight, through, strict=True)]
    yield Figure("first token, hop", "ms", middle_half(costs), FIRST_MS)
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
    rooms = {"--kv-device": "256MiB", "--kv-host": "256MiB"}
    flags = {name: {"--role": role, **rooms} for name, role in ROLES.items()}
    with replicas(options.model, flags) as clients:
        ways = list(clients.values())
        while "missing" in ways[1].get("/v1/sessions").json() or "a" not in ways[1].post("/v1/sessions").json()["id"]:
            time.sleep(0.1)
        figures = list(measure(ways, options.rounds, options.streams, options.tokens))
    title = f"A hop: {options.model}, {' '.join(processor_flags()) or NO_FLAGS}"
    print(to_markdown(figure_table(title, figures)))


if __name__ == "__main__":
    main()
