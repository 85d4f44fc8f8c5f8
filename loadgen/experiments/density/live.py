"""How a run goes, on the terminal, while it goes."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.text import Text

from loadgen.load.clocks import TurnClock
from loadgen.load.records import Run
from loadgen.load.trace import Trace, planned_turns
from loadgen.report.tables import duration

DRAW_EVERY_S = 0.5
"""Drawing takes time from the clock that measures: twice a second is often enough to watch."""
TELL_EVERY_S = 5.0
"""Where there is no terminal, a line this often."""
STARTS = "the server starts"
WARMS_UP = "the server is up and warms up with a turn that is not measured"
TIERS, MOVING = ("device", "host", "disk"), "moving"


class Watched:
    """A run that is shown. Its clock is set by the first change. `says` tells what happens until then."""

    def __init__(self, title: str, trace: Trace) -> None:
        self.says = STARTS
        self._title, self._trace = title, trace
        self._run: Run | None = None
        self._in_flight: Collection[TurnClock] = ()
        self._started = 0.0

    def changed(self, run: Run, in_flight: Collection[TurnClock] = ()) -> None:
        """The `run` begins, or a turn of it is over, this moment; the clocks `in_flight` go on."""
        if self._run is None:
            self._started = time.perf_counter()
        self._run, self._in_flight = run, in_flight

    def told(self) -> str:
        """How far it is, in one line."""
        run = self._run
        if run is None:
            return f"{self._title}: {self.says}"
        now_s = run.duration_s or time.perf_counter() - self._started
        planned, turns = planned_turns(self._trace), tuple(run.turns)
        failed = sum(failure.turn is not None for failure in tuple(run.failures))
        arrived = sum(agent.arrival_s <= now_s for agent in self._trace)
        resumed = [turn.ttft_s for turn in turns if turn.turn > 0]
        waits = "p50 {:,.0f} ms, p99 {:,.0f} ms".format(*1000 * np.percentile(resumed, (50, 99))) if resumed else "-"
        tokens = sum(turn.cost.completion_tokens for turn in turns)
        tokens += sum(len(clock.token_times_s) for clock in tuple(self._in_flight))
        sessions = by_tier(run.samples[-1].sessions) if run.samples and run.samples[-1].sessions else {}
        done = (len(turns) + failed) / planned
        left = f", about {duration(now_s / done - now_s)} left" if 0.05 < done < 1 else ""
        return (
            f"{self._title}: {len(turns):,} of {planned:,} turns, {failed:,} failed; "
            f"{arrived:,} of {len(self._trace):,} agents arrived, {len(self._in_flight):,} turns under way; "
            f"resumed TTFT {waits}; {tokens:,} tokens, {tokens / max(now_s, 1e-3):,.0f} tokens/s; "
            + (f"sessions: {', '.join(f'{tier} {count}' for tier, count in sessions.items())}; " if sessions else "")
            + f"{duration(now_s)}{left}"
        )


def by_tier(sessions: Mapping[str, int]) -> dict[str, int]:
    """Sessions in each tier, and those on their way from one to another, which Djinn counts by where they go."""
    resting = {tier: sessions.get(tier, 0) for tier in TIERS}
    return {**resting, MOVING: sum(sessions.values()) - sum(resting.values())}


class LiveView:
    """What is known of the run that is on. `begin` each run; the rest happens by itself."""

    def __init__(self, console: Console, trace: Trace, repeats: int) -> None:
        self._console, self._trace, self._repeats = console, trace, repeats
        self._current: Watched | None = None

    def begin(self, target: str, repeat: int) -> Watched:
        """Show the run of `target` that begins now, number `repeat` from 0, from now on.

        Returns what is to be told when the run has changed.
        """
        self.tell()
        title = f"{target}, run {repeat + 1} of {self._repeats}" if self._repeats > 1 else target
        self._current = Watched(title, self._trace)
        return self._current

    def told(self) -> str:
        """The run that is on; empty before the first."""
        return "" if self._current is None else self._current.told()

    def tell(self) -> None:
        """Print it."""
        if line := self.told():
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def watching(console: Console, trace: Trace, repeats: int) -> Iterator[LiveView]:
    """Show how the runs go while the block runs: drawn anew twice a second, or told in lines where `console` is not a
    terminal.
    """
    view = LiveView(console, trace, repeats)
    if console.is_terminal:
        with console.status("") as status, _every(DRAW_EVERY_S, lambda: status.update(Text(view.told()))):
            yield view
    else:
        with _every(TELL_EVERY_S, view.tell):
            yield view
    view.tell()


@contextmanager
def _every(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Call it again and again in a thread: a terminal that is slow to write to does not hold up the load."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, name="live view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
