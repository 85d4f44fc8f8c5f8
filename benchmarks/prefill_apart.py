"""What long prompts cost those who decode: `python -m benchmarks.prefill_apart`. Prompts are computed together with
eight sessions that decode, on one server, or apart, on a second one. Each server has a core of its own.

Prompts come one after the other, each a moment after the first token of the one before. The time per token is that
between two tokens of a session, as its client sees it, over all sessions of a round: its 99th percentile. A round
without prompts, of the same server, is what it is held against. The client shares the second core.
Nothing is drafted: how long a step takes would depend on the text.
"""

import argparse
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median, quantiles

import httpx

from benchmarks.command import bind_to_cores
from benchmarks.measuring import middle_half, ratio_of_medians
from benchmarks.record import RESULTS, Run, write_run
from benchmarks.replicas import greedy, open_session, random_prompt, replicas
from loadgen.options.common import sigterm_as_interrupt
from loadgen.report.tables import Figure, Target, figure_table, to_markdown

SESSIONS, SHORT = 8, 128
ROLES = {"together": {"a": "both"}, "apart": {"a": "decode", "b": "prefill"}}
MOST = Target(1.2)
PAUSE_S = 0.5
POOL, FILLING = "640MiB", 14_500
"""Of KV on the device and on the host, and tokens of the model whose KV that is."""


FLAGS = {"--kv-device": POOL, "--kv-host": POOL, "--kv-disk": "0", "--max-draft-tokens": "0"}


@dataclass(frozen=True, slots=True)
class Round:
    """What one round has found. Times in seconds."""

    gaps: tuple[float, ...]
    first_tokens: tuple[float, ...]
    """Of the long prompts."""

    @property
    def p99(self) -> float:
        """Of the gaps."""
        return quantiles(self.gaps, n=100)[98]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApartRun(Run):
    """All rounds, by way and by whether prompts came."""

    prompt_tokens: int
    decoded: int
    rounds: dict[str, list[Round]]


def ask(http: httpx.Client, token_ids: list[int], max_tokens: int) -> Iterator[float]:
    """A turn of a session of its own: when each of its tokens came."""
    session = open_session(http)
    with http.stream("POST", f"{session}/generate", json={**greedy(token_ids, max_tokens), "stream": True}) as answer:
        for line in answer.raise_for_status().iter_lines():
            if line == "event: token":
                yield time.perf_counter()
    http.delete(session).raise_for_status()


def play(http: httpx.Client, random: Random, decoded: int, prompt_tokens: int) -> Round:
    """Decode in all sessions at once, beside long prompts unless `prompt_tokens` is 0. The time of each session's own
    prompt, and what comes until all decode, does not count.
    """
    all_decode, stopped = threading.Barrier(SESSIONS + 1), threading.Event()
    firsts, ends = list[float](), list[list[float]]()

    def decode(seed: int) -> None:
        times = list[float]()
        turn = ask(http, random_prompt(Random(seed), SHORT), decoded)
        for number, at in enumerate(turn):
            if number == 0:
                all_decode.wait()
            times.append(at)
        stopped.set()
        ends.append(times[2:])

    def ask_for_long_ones() -> None:
        all_decode.wait()
        while prompt_tokens and not stopped.wait(PAUSE_S):
            began = time.perf_counter()
            for at in ask(http, random_prompt(random, prompt_tokens), 1):
                firsts.append(at - began)

    with ThreadPoolExecutor(SESSIONS + 1) as pool:
        working = [pool.submit(decode, random.randrange(1 << 30)) for _ in range(SESSIONS)]
        working.append(pool.submit(ask_for_long_ones))
        for each in working:
            each.result()
    until = min(times[-1] for times in ends)  # from the first end on, fewer decode
    gaps = [after - at for times in ends for at, after in pairwise(times) if after <= until]
    return Round(tuple(gaps), tuple(firsts))


def measure(options: argparse.Namespace, cores: list[int]) -> dict[str, list[Round]]:
    """Rounds with and without prompts, in turn, of each way."""
    found: dict[str, list[Round]] = {}
    for way in options.ways:
        flags = {name: {"--role": role, **FLAGS} for name, role in ROLES[way].items()}
        with replicas(options.model, flags, cores=cores) as clients:
            http = clients["a"]
            os.sched_setaffinity(0, cores[-1:])
            random = Random(7)
            play(http, random, 32, 0)  # and meanwhile the servers find each other
            for _ in range(-(-FILLING // options.prompt_tokens)):  # new memory comes page by page, which takes longer
                list(ask(http, random_prompt(random, options.prompt_tokens), 1))
            for _ in range(options.rounds):
                for name, tokens in ((f"{way}, quiet", 0), (way, options.prompt_tokens)):
                    found.setdefault(name, []).append(play(http, random, options.decoded, tokens))
                    last = found[name][-1]
                    print(f"{name}: p99 {1e3 * last.p99:.0f} ms, {len(last.first_tokens)} prompts", flush=True)
            os.sched_setaffinity(0, cores)
    return found


def figures_of(found: dict[str, list[Round]]) -> Iterator[Figure]:
    """The lines of the table."""
    for way in (each for each in ROLES if each in found):
        quiet, with_prompts = ([each.p99 for each in found[name]] for name in (f"{way}, quiet", way))
        middle = [median(each.gaps) for each in found[way]]
        first = [at for each in found[way] for at in each.first_tokens]
        yield Figure(f"{way}: p99 of the time per token, quiet", "ms", middle_half([1e3 * each for each in quiet]))
        yield Figure(f"{way}: p99 beside prompts", "ms", middle_half([1e3 * each for each in with_prompts]))
        yield Figure(f"{way}: median beside prompts", "ms", middle_half([1e3 * each for each in middle]))
        target = MOST if way == "apart" else None
        yield Figure(f"{way}: p99 beside prompts / quiet", "×", ratio_of_medians(with_prompts, quiet), target)
        yield Figure(f"{way}: first token of a prompt", "s", middle_half(first))


def main() -> None:
    """Measure, show the table, and keep it."""
    parser = argparse.ArgumentParser("python -m benchmarks.prefill_apart", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="default smollm2-135m-instruct")
    parser.add_argument("--ways", nargs="+", choices=ROLES, default=list(ROLES), help="default both")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind, at least 2; default 5")
    parser.add_argument("--decoded", type=int, default=800, help="tokens of each session in a round; default 800")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="default 4000")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for results")
    parser.add_argument("--no-output", action="store_true", help="write no file")
    options = parser.parse_args()
    with sigterm_as_interrupt():
        found = measure(options, bind_to_cores(2))
    title = f"Prompts of {options.prompt_tokens} tokens beside {SESSIONS} sessions that decode: {options.model}"
    table = to_markdown(figure_table(title, figures_of(found)))
    print(table)
    if not options.no_output:
        run = ApartRun(model=options.model, prompt_tokens=options.prompt_tokens, decoded=options.decoded, rounds=found)
        heading = f"# {title}, on {run.place_and_time}: {options.rounds} rounds\n\n"
        print(f"written: {write_run(options.output, 'prefill-apart-', run, heading + table)}")


if __name__ == "__main__":
    main()
