"""A row's way up the layers as data: its layers, and the marks where breakpoints act. Pure planning: no tensors."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from app.domain.breakpoints import Intervention
from app.domain.positions import Runs, clip_runs


@dataclass(frozen=True, slots=True)
class Record:
    """Keep the residual stream at these positions for the breakpoint."""

    boundary: int
    breakpoint: str
    runs: Runs


@dataclass(frozen=True, slots=True)
class LoadCheckpoint:
    """Put the sequence's checkpoint in the place of what was recomputed."""

    boundary: int


Step = Intervention | Record | LoadCheckpoint


@dataclass(frozen=True, slots=True)
class Mark:
    """Steps to do at `boundary`, in this order, before the row goes on or stops."""

    boundary: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class PassPlan:
    """A row's layers `[lo, hi)` and the marks on the way. A row that `pauses` leaves its checkpoint at `hi`."""

    lo: int
    hi: int
    marks: tuple[Mark, ...] = ()
    pauses: bool = False
    breakpoint: str | None = None
    """The one that it pauses for."""
    new_edits: tuple[Intervention, ...] = ()
    """Those of `marks` that the log does not have yet."""
    spent: tuple[str, ...] = ()
    """Breakpoints that act once, and have."""


def marks_of(steps: Iterable[Step]) -> tuple[Mark, ...]:
    """The marks for these steps, lowest boundary first; steps at one boundary keep their order."""
    boundary = attrgetter("boundary")
    return tuple(Mark(at, tuple(found)) for at, found in groupby(sorted(steps, key=boundary), key=boundary))


def clip_way(way: PassPlan, first: int, end: int) -> PassPlan:
    """The way of positions `[first, end)` of a row: what happens to them, at the same boundaries."""
    if not way.marks:
        return way
    steps = (_clip_step(step, first, end) for mark in way.marks for step in mark.steps)
    return replace(way, marks=marks_of(step for step in steps if step is not None))


def _clip_step(step: Step, first: int, end: int) -> Step | None:
    """The part of a step that concerns positions `[first, end)`, if there is one."""
    match step:
        case Intervention():
            return step.clip(first, end)
        case Record():
            inside = clip_runs(step.runs, first, end)
            return replace(step, runs=inside) if inside else None
        case LoadCheckpoint():
            return step
