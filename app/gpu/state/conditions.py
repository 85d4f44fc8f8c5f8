"""Which positions of a pass a breakpoint is for, and which of those an edit chooses. Pure."""

from collections.abc import Sequence

from app.domain.breakpoints import Pass, Positions, When
from app.domain.positions import Run, Runs, clip_runs, multiples, runs_of

Span = tuple[int, int]
"""Positions from the first to before the second."""


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
    if when.token_id is None:
        return found
    return runs_of(p for run in found for p in run.positions if token_ids[p] == when.token_id)


def may_meet(when: When, position: int) -> bool:
    """Whether the conditions can hold at a position that is decoded, whatever token will stand there."""
    return (
        when.in_pass is not Pass.PREFILL
        and when.position in (None, position)
        and (when.every is None or position % when.every == 0)
    )


def select(positions: Positions, runs: Runs, prompt_tokens: int) -> Runs:
    """The part of `runs`, which are in one pass, that `positions` chooses.

    A decoded token is the last of its pass; in a context it is the one that the next token is sampled from.
    """
    if positions.last:
        last = runs[-1].end - 1 if runs[0].first >= prompt_tokens else prompt_tokens - 1
        return clip_runs(runs, last, last + 1)
    return clip_runs(runs, positions.first, runs[-1].end if positions.end is None else positions.end)
