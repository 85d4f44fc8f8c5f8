"""A row's path up the layers: where it begins and stops, and what breakpoints do on it. Pure planning: no tensors.

Positions that have had their KV before (`reached`) are recomputed exactly as they were, from the log of
interventions; only new positions meet breakpoints.

A pass that stops inside a layer goes on from below it: the layer runs once more, makes the edits again that came before
the stop, and has the checkpoint put in at its point. So a layer needs no second way in.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Self

from app.domain.breakpoints import (
    OPERATION_WORK,
    STEP_WORK,
    Action,
    Breakpoint,
    Edit,
    Gate,
    Intervention,
    Pass,
    Positions,
    When,
)
from app.domain.points import HEAD, Place, Point, boundary_of, place_of
from app.domain.positions import Run, Runs, clip_runs, count, multiples, positions_of, runs_of
from app.gpu.state.checkpoints import Reads
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.sequence import TokenSequence, TurnState

NO_EDITS = InterventionLog()
BEFORE_ALL: Place = (0, 0)
"""No point is there."""
Span = tuple[int, int]
"""Positions from the first to before the second."""
Meeting = tuple[Breakpoint, Runs]
"""A breakpoint, and the positions of a row that it is for: at least one."""


@dataclass(frozen=True, slots=True)
class _AtPoint:
    """Something that is done where a pass comes to a point."""

    boundary: int
    point: Point

    @property
    def place(self) -> Place:
        """Where in a pass."""
        return place_of(self.boundary, self.point)


@dataclass(frozen=True, slots=True)
class Record(_AtPoint):
    """Keep what stands at these positions for the breakpoint, of some `heads` or of all, or what something that `reads`
    makes of it. With a `gate` it is kept where that holds.
    """

    breakpoint: str
    runs: Runs
    heads: tuple[int, ...] = ()
    reads: Reads | None = None
    gate: Gate | None = None
    is_kept: bool = False
    """Whether what is read is kept as a capture, and not told."""

    @property
    def layer(self) -> int:
        """The point's."""
        return self.boundary - (2 if self.point in HEAD else 1)


@dataclass(frozen=True, slots=True)
class ReadFeature(_AtPoint):
    """Read the activation of a feature that an edit of these positions will change, further up the same layer."""

    runs: Runs
    edit: Edit


@dataclass(frozen=True, slots=True)
class LoadCheckpoint(_AtPoint):
    """Put the sequence's checkpoint in the place of what was recomputed."""


Step = Intervention | Record | ReadFeature | LoadCheckpoint


@dataclass(frozen=True, slots=True)
class PassPlan:
    """A row's layers `[lo, hi)`, and what to do at points before it goes on or stops: `steps`, lowest place first,
    those at one place in their order. A row that `pauses` leaves its checkpoint at that point of `hi`.
    """

    lo: int
    hi: int
    steps: tuple[Step, ...] = ()
    pauses: Point | None = None
    breakpoint: str | None = None
    """Why it pauses."""
    new_edits: tuple[Intervention, ...] = ()
    """Those of `steps` that the log does not have yet."""
    spent: tuple[str, ...] = ()
    """Breakpoints that act once, and have."""

    def at(self, boundary: int, point: Point = Point.RESID_POST) -> list[Step]:
        """The steps at this point."""
        return [step for step in self.steps if step.boundary == boundary and step.point is point]

    def pauses_at(self, boundary: int, point: Point = Point.RESID_POST) -> bool:
        """Whether the row stops there."""
        return self.pauses is point and self.hi == boundary

    def points_in(self, boundary: int) -> set[Point]:
        """The points inside the layer below the boundary at which something is done."""
        if not self.steps and self.pauses is None:
            return set()
        points = {step.point for step in self.steps if step.boundary == boundary}
        if self.pauses is not None and self.hi == boundary:
            points.add(self.pauses)
        return points - {Point.RESID_POST}

    def clip(self, first: int, end: int) -> Self:
        """The path of positions `[first, end)` of the row: what happens to them, at the same boundaries."""
        parts = (_clip_step(step, first, end) for step in self.steps)
        return replace(self, steps=tuple(part for part in parts if part is not None)) if self.steps else self

    @property
    def reached(self) -> list[Runs]:
        """The positions of each edit and capture."""
        return [step.runs for step in self.steps if not isinstance(step, LoadCheckpoint)]


def _clip_step(step: Step, first: int, end: int) -> Step | None:
    """The part of a step that concerns positions `[first, end)`, if there is one."""
    match step:
        case Intervention():
            return step.clip(first, end)
        case Record() | ReadFeature():
            inside = clip_runs(step.runs, first, end)
            return replace(step, runs=inside) if inside else None
        case LoadCheckpoint():
            return step


def work_of(reached: Iterable[Runs]) -> int:
    """What edits and captures that reach these positions take, in the unit of `STEP_WORK`."""
    return sum(max(OPERATION_WORK, count(runs)) for runs in reached if runs)


def plan_row(
    sequence: TokenSequence, turn: TurnState, num_layers: int, *, budget: int, captured: int, paused: int
) -> tuple[int, PassPlan]:
    """How many of the next tokens of a sequence with breakpoints run, and on which path.

    The row has at most `paused` tokens where it may pause, `captured` where it is captured and cannot pause, and
    `budget`, which depends on the load of others, where a client does not see where it ends. It ends before breakpoints
    do more in it than is for a whole step, unless it is the rest of a pass.
    """
    length = _longest_row(sequence, turn, budget, captured, paused)
    path = _plan_pass(sequence, turn, length, num_layers)
    while length > 1 and sequence.paused_pass is None and work_of(path.reached) > STEP_WORK:
        # A shorter row may end before a pause, and then have more to do above it.
        length = _part_within_step(path, sequence.computed, length)
        path = _plan_pass(sequence, turn, length, num_layers)
    return length, path


def _longest_row(sequence: TokenSequence, turn: TurnState, budget: int, captured: int, paused: int) -> int:
    """Positions that are new and that are not are never in one row. Edits are the same in any part. A pause is for all
    of a part, and so is the one action of a breakpoint.
    """
    if sequence.paused_pass is not None:
        return sequence.paused_pass.length
    left = _context_end(sequence) - sequence.computed
    if sequence.computed < sequence.reached:
        return min(left, sequence.reached - sequence.computed, budget)
    armed = sequence.breakpoints.values()
    if turn.pause_at is not None or any(each.may_pause or each.once for each in armed):
        return min(left, paused)
    return min(left, captured if any(each.action in (Action.CAPTURE, Action.FEATURES) for each in armed) else budget)


def _part_within_step(path: PassPlan, first: int, length: int) -> int:
    """How many of a row's `length` tokens from position `first` have the work of a step at most; at least 1."""
    reached = path.reached

    def work(tokens: int) -> int:
        return work_of(clip_runs(runs, first, first + tokens) for runs in reached)

    return max(1, bisect_right(range(1, length), STEP_WORK, key=work))


def _plan_pass(sequence: TokenSequence, turn: TurnState, length: int, num_layers: int) -> PassPlan:
    """The path of the next `length` tokens of a sequence. They are all new, or have all been computed before."""
    span, paused = (sequence.computed, sequence.computed + length), sequence.paused_pass
    if paused is None and sequence.computed < sequence.reached:
        return PassPlan(0, num_layers, _in_order(sequence.interventions.within(*span)))
    if paused is None:
        return _plan_new(sequence, turn, span, BEFORE_ALL, num_layers)
    plan = _plan_new(sequence, turn, span, paused.place, num_layers)
    if paused.held and not paused.is_inside:
        return replace(plan, lo=paused.boundary)
    # The layer runs again in which the pass has stopped, or if the KV below has been lost, all of the pass.
    lo = paused.boundary if paused.held else 0
    below = [made for made in sequence.interventions.within(*span) if lo < made.boundary and made.place < paused.place]
    load = LoadCheckpoint(paused.place[0], paused.point)
    return replace(plan, lo=lo, steps=(*_in_order(below), load, *plan.steps))


def _plan_new(sequence: TokenSequence, turn: TurnState, span: Span, behind: Place, num_layers: int) -> PassPlan:
    """The path from the lowest layer, as far as it is behind a place."""
    meetings = _meetings(sequence, span)
    stop = _first_pause(turn, meetings, span, behind)
    if stop is None and not meetings:
        return PassPlan(0, num_layers)
    place, pauses, stopped_by = stop or (None, None, None)
    acts = [(each, step) for each, step in _acts(sequence, meetings, behind) if place is None or step.place <= place]
    acted = {each.id for each, _ in acts if each.gate is None} | {stopped_by}
    steps = [step for _, step in acts]
    return PassPlan(
        0,
        num_layers if place is None else place[0],
        _in_order(steps),
        pauses=pauses,
        breakpoint=stopped_by,
        new_edits=tuple(step for step in steps if isinstance(step, Intervention) and step.point not in HEAD),
        spent=tuple(each.id for each in sequence.breakpoints.values() if each.once and each.id in acted),
    )


def _in_order(steps: Sequence[Step]) -> tuple[Step, ...]:
    """With what edits have to read on the way to them."""
    reading = list[Step]()
    for step in steps:
        if isinstance(step, Intervention) and step.edit.feature is not None and step.edit.feature.reads is not None:
            reading.append(ReadFeature(step.boundary, step.edit.feature.reads, step.runs, step.edit))
    return tuple(sorted([*reading, *steps], key=attrgetter("place")))


def _first_pause(
    turn: TurnState, meetings: list[Meeting], span: Span, behind: Place
) -> tuple[Place, Point, str | None] | None:
    """The lowest place `behind` another at which the row pauses, its point, and the breakpoint that asks for it."""
    stops = list[tuple[Place, Point, str | None]]()
    if turn.pausable and not turn.to_end:
        pauses = (each for each, _ in meetings if each.action is Action.PAUSE and each.gate is None)
        stops = [(place_of(layer + 1, each.point), each.point, each.id) for each in pauses for layer in each.layers]
    if turn.pause_at is not None:
        boundary, point, position, asked_by = turn.pause_at
        if span[0] <= position < span[1]:
            stops.append((place_of(boundary, point), point, asked_by))
    return min((stop for stop in stops if stop[0] > behind), key=itemgetter(0), default=None)


def _acts(
    sequence: TokenSequence, meetings: list[Meeting], behind: Place
) -> list[tuple[Breakpoint, Intervention | Record]]:
    """What breakpoints do to the positions that they meet `behind` a place, in the order they were armed in."""
    acts: list[tuple[Breakpoint, Intervention | Record]] = []
    for each, runs in meetings:
        chosen = [(edit, select(edit.positions, runs, sequence.prompt_tokens)) for edit in each.edits]
        for boundary in (boundary_of(each.point, layer) for layer in each.layers):
            if place_of(boundary, each.point) <= behind:
                continue
            if each.action is Action.PAUSE and each.gate is not None:
                acts.append((each, Record(boundary, each.point, each.id, runs, reads=each.gate)))
            elif each.action not in (Action.PAUSE, Action.EDIT):
                reads, kept = each.probe or each.features, each.action is Action.CAPTURE
                acts.append((each, Record(boundary, each.point, each.id, runs, each.heads, reads, each.gate, kept)))
            acts += [(each, made) for edit, part in chosen for made in _made(edit, part, boundary, each.point)]
    return acts


def _made(edit: Edit, runs: Runs, boundary: int, point: Point) -> list[Intervention]:
    """What the edit makes at these positions. One that has rows is made for each neighbourhood, with its rows."""
    if not edit.has_rows:
        return [Intervention.at(runs, boundary, edit, point)] if runs else []
    neighbours = (((run.first, run.end),) if run.step == 1 else ((p, p + 1) for p in run.positions) for run in runs)
    offset = edit.positions.first
    return [
        Intervention(first, end, boundary, edit.for_rows(first - offset, end - offset), point=point)
        for first, end in chain.from_iterable(neighbours)
    ]


def runs_plainly(sequence: TokenSequence, turn: TurnState, position: int) -> bool:
    """Whether a token that is decoded at `position`, whichever it will be, runs all layers, and nothing is done on its
    path.
    """
    return not _stops(sequence, turn, position) and not _may_meet(sequence, position)


def plan_ahead(sequence: TokenSequence, turn: TurnState, position: int, num_layers: int) -> PassPlan | None:
    """The path of a token that is decoded at `position`, whichever it will be. None where that depends on the token, or
    more than an edit may be done on it.
    """
    unsure = (each.when.token_id is not None or _must_run(each) for each in _may_meet(sequence, position))
    if _stops(sequence, turn, position) or any(unsure):
        return None
    return _plan_new(sequence, turn, (position, position + 1), BEFORE_ALL, num_layers)


def expected_edits(sequence: TokenSequence) -> tuple[InterventionLog, int]:
    """The interventions that the sequence's context will be computed with, and up to which position that is certain:
    from there on a breakpoint wants the pass to be run. A turn keeps them. Callers change nothing of them.
    """
    end, turn = _context_end(sequence), sequence.turn
    if not sequence.watched:
        return NO_EDITS, end
    basis = (end, sequence.reached, sequence.interventions.changes, *sequence.breakpoints.values())
    if turn is not None and turn.expected is not None and turn.expected[0] == basis:
        return turn.expected[1:]
    log, limit = sequence.interventions.until(min(end, sequence.reached)), end
    if sequence.reached < end:
        wanted = _meetings(sequence, (sequence.reached, end))
        limit = min((runs[0].first for each, runs in wanted if _must_run(each)), default=end)
        for _, step in _acts(sequence, _meetings(sequence, (sequence.reached, limit)), BEFORE_ALL):
            if isinstance(step, Intervention) and step.point not in HEAD:
                log.add(step)
    if turn is not None:
        turn.expected = basis, log, limit
    return log, limit


def _context_end(sequence: TokenSequence) -> int:
    """Up to where the history is computed before a paused pass goes on."""
    return len(sequence.tokens) if sequence.checkpoint is None else sequence.checkpoint.first


def _stops(sequence: TokenSequence, turn: TurnState, position: int) -> bool:
    """Whether the turn has stopped, or is to stop at `position`, for no breakpoint's sake."""
    return sequence.checkpoint is not None or (turn.pause_at is not None and turn.pause_at[2] == position)


def _must_run(each: Breakpoint) -> bool:
    """Whether the pass has to be run where the breakpoint meets it: what an edit makes can also be in the cache."""
    return each.action is not Action.EDIT or each.once


def _may_meet(sequence: TokenSequence, position: int) -> list[Breakpoint]:
    """The breakpoints that may meet a token that is decoded at `position`, whichever it will be."""
    return [
        each
        for each in sequence.breakpoints.values()
        if each.when.in_pass is not Pass.PREFILL
        and each.when.position in (None, position)
        and (each.when.every is None or position % each.when.every == 0)
    ]


def _meetings(sequence: TokenSequence, span: Span) -> list[Meeting]:
    """Breakpoints that meet positions of the span, in the order they were armed in."""
    prompt_tokens = sequence.prompt_tokens
    found = ((each, met(each.when, span, sequence.tokens, prompt_tokens)) for each in sequence.breakpoints.values())
    return [(each, runs) for each, runs in found if runs]


def met(when: When, span: Span, token_ids: Sequence[int], prompt_tokens: int) -> Runs:
    """Where in `span` the conditions hold. Positions before `prompt_tokens` belong to the prefill pass."""
    first, end = span
    if when.in_pass is Pass.PREFILL:
        end = min(end, prompt_tokens)
    elif when.in_pass is Pass.DECODE:
        first = max(first, prompt_tokens)
    if when.position is not None:
        first, end = max(first, when.position), min(end, when.position + 1)
    if first >= end:
        return ()
    found = (Run(first, end),) if when.every is None else multiples(when.every, first, end)
    if when.among:
        inside = clip_runs(when.among, first, end)
        found = inside if when.every is None else runs_of(p for p in positions_of(inside) if p % when.every == 0)
    if when.token_id is None:
        return found
    return runs_of(p for run in found for p in run.positions if token_ids[p] == when.token_id)


def select(positions: Positions, runs: Runs, prompt_tokens: int) -> Runs:
    """The part of `runs`, which are in one pass, that `positions` chooses.

    A decoded token is the last of its pass; in a context it is the one that the next token is sampled from.
    """
    if positions.last:
        last = runs[-1].end - 1 if runs[0].first >= prompt_tokens else prompt_tokens - 1
        return clip_runs(runs, last, last + 1)
    return clip_runs(runs, positions.first, runs[-1].end if positions.end is None else positions.end)
