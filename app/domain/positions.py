"""Sets of positions as runs: every second position of a long context is one. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import NamedTuple


class Run(NamedTuple):
    """Positions from `first` to before `end`, `step` apart. `end` is just after the last; a single one has step 1."""

    first: int
    end: int
    step: int = 1

    @property
    def positions(self) -> range:
        """All of them."""
        return range(self.first, self.end, self.step)


Runs = tuple[Run, ...]
"""Runs one behind the other, lowest first."""


def multiples(step: int, first: int, end: int) -> Runs:
    """Positions in `[first, end)` that `step` divides."""
    run = _clip(Run(0, end, step), first, end)
    return () if run is None else (run,)


def runs_of(positions: Iterable[int]) -> Runs:
    """Rising positions as runs, the same ones for the same positions."""
    runs: list[Run] = []
    for position in positions:
        _append(runs, Run(position, position + 1))
    return tuple(runs)


def positions_of(runs: Runs) -> Iterator[int]:
    """All positions, lowest first."""
    return chain.from_iterable(run.positions for run in runs)


def count(runs: Runs) -> int:
    """How many positions they have."""
    return sum(len(run.positions) for run in runs)


def clip_runs(runs: Runs, first: int, end: int) -> Runs:
    """What lies in `[first, end)`."""
    after = bisect_right(runs, first, key=attrgetter("end"))
    before = bisect_left(runs, end, lo=after, key=attrgetter("first"))
    inside = runs[after:before]
    if not inside or (inside[0].first >= first and inside[-1].end <= end):
        return inside
    edges = (_clip(run, first, end) for run in inside)
    return tuple(run for run in edges if run is not None)


def join(runs: Runs, more: Runs) -> Runs:
    """`runs`, and behind them `more`. A run that goes on becomes part of the one before it."""
    joined = list(runs)
    _append(joined, more[0])
    return (*joined, *more[1:])


def _append(runs: list[Run], run: Run) -> None:
    if runs:
        last = runs[-1]
        step = run.first - (last.end - 1)
        if _fits(last, step) and _fits(run, step):
            runs[-1] = Run(last.first, run.end, step)
            return
    runs.append(run)


def _fits(run: Run, step: int) -> bool:
    """Whether the positions are `step` apart, as far as there are two."""
    return run.step == step or run.end - run.first == 1


def _clip(run: Run, first: int, end: int) -> Run | None:
    start = run.first + max(0, -((run.first - first) // run.step)) * run.step  # its first place from `first` on
    inside = range(start, min(run.end, end), run.step)
    if not inside:
        return None
    return Run(inside[0], inside[-1] + 1, run.step if len(inside) > 1 else 1)
