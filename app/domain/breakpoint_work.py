"""How much breakpoints may do in one pass, which all sessions of a step wait for. Pure."""

from collections.abc import Iterable

from app.domain.breakpoints import Action, Breakpoint, Edit, Pass, When
from app.domain.errors import FieldOutOfRange

MAX_WORK = 256
"""Edits and captures of one session, counted at each of their layers: what its passes may add to everybody's step."""
MAX_SPAN_WORK = 512
"""The same, with each edit counted once more at each span of neighbouring positions that a part of a context can have
for it. A capture reads all of its spans at once, so it counts once."""


def check_work(armed: Iterable[Breakpoint], more: Breakpoint, part_tokens: int) -> None:
    """Raise `FieldOutOfRange` if `armed` and `more`, of one session, are too much for one pass of `part_tokens`."""
    breakpoints = [*armed, more]
    work = work_of(breakpoints)
    if work > MAX_WORK:
        raise FieldOutOfRange(
            f"the session would make {work} edits and captures in a pass, counted at each layer, with this breakpoint; "
            f"at most {MAX_WORK} may be: remove some, or name fewer layers or edits",
            param="breakpoints",
        )
    work = span_work_of(breakpoints, part_tokens)
    if work > MAX_SPAN_WORK:
        field = _field_of(more, part_tokens)
        raise FieldOutOfRange(
            f"{field}: the session would make up to {work} edits and captures in a pass of {part_tokens} tokens with "
            "this breakpoint, counted at each layer and each span of neighbouring positions; the number must be from 1 "
            f"to {MAX_SPAN_WORK}: let fewer positions meet the breakpoint, name fewer layers or edits, or remove some",
            param=field,
        )


def work_of(breakpoints: Iterable[Breakpoint]) -> int:
    """Edits and captures that breakpoints can make in one pass, each counted at every layer."""
    return sum(max(1, len(each.edits)) * len(each.layers) for each in _working(breakpoints))


def span_work_of(breakpoints: Iterable[Breakpoint], part_tokens: int) -> int:
    """Edits and captures that breakpoints can make in one pass over `part_tokens` tokens: each is counted at every
    layer, and an edit at every span too.
    """
    return sum(_spans(each, part_tokens) * len(each.layers) for each in _working(breakpoints))


def _working(breakpoints: Iterable[Breakpoint]) -> Iterable[Breakpoint]:
    return (each for each in breakpoints if each.action is not Action.PAUSE)


def _spans(breakpoint: Breakpoint, part_tokens: int) -> int:
    """Spans that the edits of a breakpoint, or its capture, take at one layer, whichever tokens stand there."""
    if breakpoint.action is Action.CAPTURE:
        return 1
    return sum(_spans_of(edit, breakpoint.when, part_tokens) for edit in breakpoint.edits)


def _spans_of(edit: Edit, when: When, part_tokens: int) -> int:
    positions, distance = edit.positions, _distance(when)
    if distance == 1 or positions.last or when.position is not None or when.in_pass is Pass.DECODE:
        return 1
    chosen = part_tokens if positions.end is None else min(part_tokens, positions.end - positions.first)
    return -(-chosen // distance)


def _distance(when: When) -> int:
    """How far apart the spans start, at least; 1 where there is only one span. A prompt can have a token at every
    second position.
    """
    return max(when.every or 1, 1 if when.token_id is None else 2)


def _field_of(breakpoint: Breakpoint, part_tokens: int) -> str:
    """The condition that makes many spans; if none does, the session's other breakpoints leave no room."""
    if breakpoint.action is not Action.EDIT or _spans(breakpoint, part_tokens) == len(breakpoint.edits):
        return "breakpoints"
    return "when.token_id" if breakpoint.when.every in (None, 1) else "when.every"
