"""Which positions of a pass a breakpoint is for, and which of those an edit chooses. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from app.domain.breakpoints import Pass, Positions, When

Span = tuple[int, int]
"""Positions from the first to before the second."""


def met(when: When, span: Span, token_ids: Sequence[int], prompt_tokens: int) -> list[Span]:
    """Where in `span` the conditions hold. Positions before `prompt_tokens` belong to the prefill pass."""
    first, end = span
    if when.in_pass is Pass.PREFILL:
        end = min(end, prompt_tokens)
    elif when.in_pass is Pass.DECODE:
        first = max(first, prompt_tokens)
    if first >= end:
        return []
    if when.position is None and when.token_id is None and when.every is None:
        return [(first, end)]
    return list(_runs(p for p in range(first, end) if _holds(when, p, token_ids[p])))


def may_meet(when: When, position: int) -> bool:
    """Whether the conditions can hold at a position that is decoded, whatever token will stand there."""
    return when.in_pass is not Pass.PREFILL and _holds_at(when, position)


def select(positions: Positions, span: Span, prompt_tokens: int) -> Span | None:
    """The part of `span` that `positions` chooses; None if that is nothing.

    A decoded token is the last of its pass; in a context it is the one that the next token is sampled from.
    """
    first, end = span
    if positions.last:
        last = end - 1 if first >= prompt_tokens else prompt_tokens - 1
        return (last, last + 1) if first <= last < end else None
    first, end = max(first, positions.first), end if positions.end is None else min(end, positions.end)
    return (first, end) if first < end else None


def _holds(when: When, position: int, token_id: int) -> bool:
    return when.token_id in (None, token_id) and _holds_at(when, position)


def _holds_at(when: When, position: int) -> bool:
    return when.position in (None, position) and (when.every is None or position % when.every == 0)


def _runs(positions: Iterable[int]) -> Iterator[Span]:
    """Spans of neighbouring positions."""
    span: Span | None = None
    for position in positions:
        if span is not None and span[1] == position:
            span = (span[0], position + 1)
            continue
        if span is not None:
            yield span
        span = (position, position + 1)
    if span is not None:
        yield span
