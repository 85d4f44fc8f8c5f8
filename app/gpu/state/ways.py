"""Planning one row's way up the layers: which breakpoints its positions meet, and where it stops.

Positions that have had their KV before (`reached`) are recomputed exactly as they were, from the log of
interventions; only new positions meet breakpoints.
"""

from dataclasses import dataclass, replace

from app.domain.breakpoint_work import STEP_WORK
from app.domain.breakpoints import Action, Breakpoint, Intervention
from app.domain.positions import Runs
from app.gpu.state.checkpoints import Checkpoint
from app.gpu.state.conditions import Span, may_meet, met, select
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.pass_plan import LoadCheckpoint, PassPlan, Record, marks_of
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import ExpectedEdits, TurnState
from app.gpu.state.work import part_within, work_of_way

NO_EDITS = InterventionLog()
Meeting = tuple[Breakpoint, Runs]
"""A breakpoint, and the positions of a row that it is for: at least one."""


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Most tokens of a row, by what is done to it."""

    paused: int
    """Where it may pause."""
    captured: int
    """Where it is captured and cannot pause."""
    left: int
    """Where a client does not see where it ends: what others have left of the step."""


def plan_row(sequence: TokenSequence, turn: TurnState, num_layers: int, limits: RowLimits) -> tuple[int, PassPlan]:
    """How many of the next tokens of a sequence with breakpoints run, and how. The row ends before breakpoints do more
    in it than is for a whole step, unless it is the rest of a pass.
    """
    length = _row_limit(sequence, turn, limits)
    way = _plan_pass(sequence, turn, length, num_layers)
    while work_of_way(way) > STEP_WORK and length > 1 and sequence.paused_pass is None:
        # A shorter row may end before a pause, and then have more to do above it.
        length = part_within(STEP_WORK, way, sequence.computed, length)
        way = _plan_pass(sequence, turn, length, num_layers)
    return length, way


def _plan_pass(sequence: TokenSequence, turn: TurnState, length: int, num_layers: int) -> PassPlan:
    """How the next `length` tokens of a sequence run. They are all new, or have all been computed before."""
    span = (sequence.computed, sequence.computed + length)
    paused = sequence.paused_pass
    if paused is not None:
        return _plan_rest(sequence, turn, paused, num_layers)
    if sequence.computed < sequence.reached:
        return PassPlan(0, num_layers, marks_of(sequence.interventions.within(*span)))
    return _plan_new(sequence, turn, span, 0, num_layers)


def runs_plainly(sequence: TokenSequence, turn: TurnState, position: int) -> bool:
    """Whether a token that is decoded at `position`, whichever it will be, runs all layers with nothing to do on the
    way.
    """
    return not _stops(sequence, turn, position) and not _meeting(sequence, position)


def plan_ahead(sequence: TokenSequence, turn: TurnState, position: int, num_layers: int) -> PassPlan | None:
    """The way of a token that is decoded at `position`, whichever it will be. None where that depends on the token, or
    more than an edit may be done on the way.
    """
    if _stops(sequence, turn, position):
        return None
    if any(_must_run(each) or each.when.token_id is not None for each in _meeting(sequence, position)):
        return None
    return _plan_new(sequence, turn, (position, position + 1), 0, num_layers)


def _stops(sequence: TokenSequence, turn: TurnState, position: int) -> bool:
    """Whether the turn has stopped, or is to stop at `position`, for no breakpoint's sake."""
    return sequence.checkpoint is not None or (turn.pause_at is not None and turn.pause_at[1] == position)


def _meeting(sequence: TokenSequence, position: int) -> list[Breakpoint]:
    """The breakpoints that may meet a token that is decoded at `position`."""
    return [each for each in sequence.breakpoints.values() if may_meet(each.when, position)]


def _row_limit(sequence: TokenSequence, turn: TurnState, limits: RowLimits) -> int:
    """Most tokens of a sequence with breakpoints in one row. Positions that are new and that are not are never in one
    row. Where a client sees the parts of a prompt, they do not depend on the load of others.
    """
    paused = sequence.paused_pass
    if paused is not None:
        return paused.length
    end = len(sequence.tokens) if sequence.checkpoint is None else sequence.checkpoint.first
    if sequence.computed < sequence.reached:
        return min(end - sequence.computed, sequence.reached - sequence.computed, limits.left)
    return min(end - sequence.computed, _new_limit(sequence, turn, limits))


def _new_limit(sequence: TokenSequence, turn: TurnState, limits: RowLimits) -> int:
    """Edits are the same in any part. A pause is for all of a part, and so is the one action of a breakpoint."""
    armed = sequence.breakpoints.values()
    if turn.pause_at is not None or any(each.action is Action.PAUSE or each.once for each in armed):
        return limits.paused
    return limits.captured if any(each.action is Action.CAPTURE for each in armed) else limits.left


def expected_edits(sequence: TokenSequence) -> tuple[InterventionLog, int]:
    """The interventions that the sequence's context will be computed with, and up to which position that is certain:
    from there on a breakpoint wants the pass to be run. A turn keeps them. Callers change nothing of them.
    """
    if not sequence.watched:
        return NO_EDITS, len(sequence.tokens)
    end = len(sequence.tokens) if sequence.checkpoint is None else sequence.checkpoint.first
    basis = (end, sequence.reached, sequence.interventions.changes, *sequence.breakpoints.values())
    turn = sequence.turn
    if turn is not None and turn.expected is not None and turn.expected.basis == basis:
        return turn.expected.log, turn.expected.limit
    log, limit = _expect(sequence, end)
    if turn is not None:
        turn.expected = ExpectedEdits(basis, log, limit)
    return log, limit


def _expect(sequence: TokenSequence, end: int) -> tuple[InterventionLog, int]:
    log = sequence.interventions.until(min(end, sequence.reached))
    if sequence.reached >= end:
        return log, end
    wanted = _meetings(sequence, (sequence.reached, end))
    limit = min((runs[0].first for each, runs in wanted if _must_run(each)), default=end)
    for _, step in _acts(sequence, _meetings(sequence, (sequence.reached, limit)), 0):
        if isinstance(step, Intervention):
            log.add(step)
    return log, limit


def _plan_rest(sequence: TokenSequence, turn: TurnState, checkpoint: Checkpoint, num_layers: int) -> PassPlan:
    """The rest of a pass that was paused; if the KV below has been lost, all of it with the checkpoint in its place."""
    span = (checkpoint.first, checkpoint.end)
    plan = _plan_new(sequence, turn, span, checkpoint.boundary, num_layers)
    if checkpoint.held:
        return plan
    below = [made for made in sequence.interventions.within(*span) if made.boundary < checkpoint.boundary]
    return replace(plan, lo=0, marks=(*marks_of([*below, LoadCheckpoint(checkpoint.boundary)]), *plan.marks))


def _plan_new(sequence: TokenSequence, turn: TurnState, span: Span, lo: int, num_layers: int) -> PassPlan:
    meetings = _meetings(sequence, span)
    stop = _first_pause(turn, meetings, span, lo)
    if stop is None and not meetings:
        return PassPlan(lo, num_layers)
    hi, stopped_by = (num_layers, None) if stop is None else stop
    acts = [(each, step) for each, step in _acts(sequence, meetings, lo) if step.boundary <= hi]
    acted = {each.id for each, _ in acts} | {stopped_by}
    steps = [step for _, step in acts]
    return PassPlan(
        lo,
        hi,
        marks_of(steps),
        pauses=stop is not None,
        breakpoint=stopped_by,
        new_edits=tuple(step for step in steps if isinstance(step, Intervention)),
        spent=tuple(each.id for each in sequence.breakpoints.values() if each.once and each.id in acted),
    )


def _first_pause(turn: TurnState, meetings: list[Meeting], span: Span, lo: int) -> tuple[int, str | None] | None:
    """The lowest boundary above `lo` at which the row pauses, and the breakpoint it does so for."""
    stops: list[tuple[int, str | None]] = []
    if turn.pausable and not turn.to_end:
        pauses = (each for each, _ in meetings if each.action is Action.PAUSE)
        stops = [(layer + 1, each.id) for each in pauses for layer in each.layers if layer + 1 > lo]
    if turn.pause_at is not None:
        boundary, position = turn.pause_at
        if boundary > lo and span[0] <= position < span[1]:
            stops.append((boundary, None))
    return min(stops, key=lambda stop: stop[0], default=None)


def _acts(sequence: TokenSequence, meetings: list[Meeting], lo: int) -> list[tuple[Breakpoint, Intervention | Record]]:
    """What breakpoints do to the positions that they meet at boundaries above `lo`, in the order they were armed in."""
    acts: list[tuple[Breakpoint, Intervention | Record]] = []
    for each, runs in meetings:
        chosen = [(edit, select(edit.positions, runs, sequence.prompt_tokens)) for edit in each.edits]
        for boundary in (layer + 1 for layer in each.layers if layer + 1 > lo):
            if each.action is Action.CAPTURE:
                acts.append((each, Record(boundary, each.id, runs)))
            acts += [(each, Intervention.at(part, boundary, edit)) for edit, part in chosen if part]
    return acts


def _meetings(sequence: TokenSequence, span: Span) -> list[Meeting]:
    """Breakpoints that meet positions of the span, in the order they were armed in."""
    prompt_tokens = sequence.prompt_tokens
    found = ((each, met(each.when, span, sequence.tokens, prompt_tokens)) for each in sequence.breakpoints.values())
    return [(each, runs) for each, runs in found if runs]


def _must_run(each: Breakpoint) -> bool:
    """Whether the pass has to be run where the breakpoint meets it: what an edit makes can also be in the cache."""
    return each.action is not Action.EDIT or each.once
