"""What the border between server and engine costs a step: `python -m benchmarks.border`. No HTTP.

One engine runs on a thread of this process, one in a process of its own. They decode the same turns, in pairs of
rounds whose order changes. The events of a step are also sent over a channel alone, and timed by their threads' CPU
time: this holds on a machine that does other work too.
"""

import argparse
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

from app.domain.values import Ticket
from app.engine_process.channel import Channel
from app.engine_process.engine import EngineProcess
from app.engine_process.frames import Load, decode, encode_events
from app.gpu.startup.loader import load_engine
from app.messages import Token
from app.model_store.resolve import resolve
from benchmarks.command import bind_to_cores
from benchmarks.engine.decoding import decode_rate
from benchmarks.engine.live import LiveEngine, random_tokens
from benchmarks.engine.loading import make_settings
from benchmarks.measuring import middle_half
from loadgen.processes.launch import NO_FLAGS, processor_flags
from loadgen.report.tables import Figure, Target, figure_table, to_markdown

PROMPT, ANSWER = 16, 256
FRAMES = 4000
WIDTHS = (1, 32)
PLACES = ("on a thread", "in a process")
MOST_MS = Target(0.1)


@contextmanager
def engines(model: str) -> Iterator[tuple[LiveEngine, LiveEngine]]:
    """One here and one apart, with the same settings."""
    settings = make_settings("cpu", model, kv_device="64MiB", max_draft_tokens=0)
    process = EngineProcess(settings.engine_timeout_s)
    with ExitStack() as stack:
        stack.callback(process.close)
        process.begin(Load.of(settings, logging.WARNING))
        here = load_engine(resolve(model, cache_dir=Path(), seed=settings.seed), settings.engine())
        yield stack.enter_context(LiveEngine(here)), stack.enter_context(LiveEngine(process.loaded()))


def step_ms(live: LiveEngine, width: int, random: Random) -> float:
    """Milliseconds of a step in which so many turns decode, as their client sees it."""
    sessions = [live.open() for _ in range(width)]
    turns = [live.submit(session, random_tokens(random, PROMPT), ANSWER) for session in sessions]
    live.finish(*turns)
    live.close(*sessions)
    return 1e3 * width / decode_rate(turns)


def frame_figures(width: int) -> list[Figure]:
    """What the events of a step cost each side, without an engine: milliseconds of CPU time."""
    ours, theirs = map(Channel, socket.socketpair())
    events = [Token(Ticket(number), 10_000 + number) for number in range(1, width + 1)]
    sides = {"engine's side": list[float](), "server's side": list[float]()}
    sent, received = sides.values()
    for _ in range(FRAMES):
        began = time.thread_time()
        theirs.send(encode_events(events))
        sent.append(1e3 * (time.thread_time() - began))
        began = time.thread_time()
        data = ours.receive(1.0)
        assert data is not None
        decode(data)
        received.append(1e3 * (time.thread_time() - began))
    return [Figure(f"{_streams(width)}, {side}", "ms", middle_half(found), MOST_MS) for side, found in sides.items()]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.border", description=__doc__)
    parser.add_argument("--model", default="random:tiny-llama", help="default random:tiny-llama, whose steps are short")
    parser.add_argument("--rounds", type=int, default=40, help="of each engine and width; 0: no engine; default 40")
    parser.add_argument("--cores", type=int, default=2, help="default 2")
    options = parser.parse_args()
    bind_to_cores(options.cores)
    figures = [figure for width in WIDTHS for figure in frame_figures(width)]
    if options.rounds:
        with engines(options.model) as both:
            for width in WIDTHS:
                figures += measure(both, width, options.rounds)
    print(to_markdown(figure_table(f"A step: {options.model}, {' '.join(processor_flags()) or NO_FLAGS}", figures)))


def measure(both: tuple[LiveEngine, LiveEngine], width: int, rounds: int) -> list[Figure]:
    """The lines of one width."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(-2, rounds):  # the first rounds compile kernels
        order = (0, 1) if number % 2 else (1, 0)
        for place in order:
            found = step_ms(both[place], width, Random(number))
            if number >= 0:
                times[place].append(found)
    differences = [apart - here for here, apart in zip(*times, strict=True)]
    streams = _streams(width)
    return [
        *(Figure(f"{streams}, {name}", "ms", middle_half(found)) for name, found in zip(PLACES, times, strict=True)),
        Figure(f"{streams}, the border", "ms", middle_half(differences), MOST_MS),
    ]


def _streams(width: int) -> str:
    return f"{width} stream{'s' * (width > 1)}"


if __name__ == "__main__":
    main()
