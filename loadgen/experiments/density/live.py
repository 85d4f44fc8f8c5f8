"""How a run goes, on the terminal, while it goes."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from loadgen.experiments.density.progress import Follower, Progress
from loadgen.experiments.density.wording import block, summary_line, told
from loadgen.load.records import Run
from loadgen.load.trace import Trace
from loadgen.load.turn_clock import TurnClock

DRAW_EVERY_S = 0.5
"""Drawing takes time from the clock that measures: twice a second is often enough to watch."""

TELL_EVERY_S = 5.0
"""Where there is no terminal, a line this often."""


STARTS = "the server starts"
WARMS_UP = "the server is up and warms up with a turn that is not measured"


class Watched:
    """A run that is shown. Its clock is set by the first change. `says` tells what happens until then."""

    def __init__(self, target: str, title: str, follower: Follower) -> None:
        self.target = target
        self.title = title
        self.says = STARTS
        self._follower = follower
        self._run: Run | None = None
        self._in_flight: Collection[TurnClock] = ()
        self._started = 0.0

    def changed(self, run: Run, in_flight: Collection[TurnClock] = ()) -> None:
        """The `run` begins, or a turn of it is over, this moment; the clocks `in_flight` go on."""
        if self._run is None:
            self._started = time.perf_counter()
        self._run, self._in_flight = run, in_flight

    def look(self) -> Progress | None:
        """How far it is, and once it is over, how far it came; None before it begins."""
        if self._run is None:
            return None
        events = sum(len(clock.token_times_s) for clock in tuple(self._in_flight))
        return self._follower.look(self._run, self._run.duration_s or time.perf_counter() - self._started, events)


class LiveView:
    """What is known of each of `targets`, which run `repeats` times. `begin` each run; the rest happens by itself."""

    def __init__(self, targets: Sequence[str], trace: Trace, repeats: int) -> None:
        self._targets = tuple(targets)
        self._trace = trace
        self._repeats = repeats
        self._last: dict[str, Progress] = {}
        self._current: Watched | None = None

    def begin(self, target: str, repeat: int) -> Watched:
        """Show the run of `target` that begins now, number `repeat` from 0, from now on.

        Returns what is to be told when the run has changed.
        """
        title = f"{target}, run {repeat + 1} of {self._repeats}" if self._repeats > 1 else target
        self._current = Watched(target, title, Follower(self._trace))
        return self._current

    def look(self) -> tuple[str, Progress | str]:
        """The run that is on, by its title, and how far it is; before it begins, what happens."""
        watched = self._current
        if watched is None:
            return "", ""
        progress = watched.look()
        if progress is not None:
            self._last[watched.target] = progress
        return watched.title, progress or watched.says

    def draw(self) -> Group:
        """A block for the target that runs, a line for every other."""
        title, progress = self.look()
        current = None if self._current is None else self._current.target
        blocks: list[Text] = []
        for target in self._targets:
            if target == current:
                blocks += block(title, progress)
            else:
                blocks.append(summary_line(target, self._last.get(target)))
        return Group(*blocks)


@contextmanager
def watching(console: Console, targets: Sequence[str], trace: Trace, repeats: int) -> Iterator[LiveView]:
    """Show how the runs go while the block runs: drawn anew twice a second, or told in lines where `console` is not a
    terminal.
    """
    view = LiveView(targets, trace, repeats)
    if not console.is_terminal:
        with _every(TELL_EVERY_S, lambda: _tell(console, view)):
            yield view
        _tell(console, view)
        return
    with Live(view.draw(), console=console, auto_refresh=False) as live:
        try:
            with _every(DRAW_EVERY_S, lambda: live.update(view.draw(), refresh=True)):
                yield view
        finally:
            live.update(view.draw(), refresh=True)


def _tell(console: Console, view: LiveView) -> None:
    title, progress = view.look()
    if title:
        console.print(told(title, progress), markup=False, highlight=False, soft_wrap=True)


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
