"""Tokens that a server computed, and those it recomputed."""

from collections.abc import Iterable, Sequence

from loadgen.load.records import TurnRecord


def total(values: Iterable[int | None]) -> int | None:
    """The sum of what servers report; None if one of the values is not reported."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def recomputed_tokens(turns: Sequence[TurnRecord]) -> dict[tuple[int, int], int | None]:
    """For each (agent, turn) of one run, the tokens of its prompt that had been computed in an earlier turn, and were
    recomputed.

    Djinn says so itself. For another server they are the tokens of the history that were not cached. Of a history all
    but the last token have been computed: that one was generated, and no turn has gone on from it yet. A cache that
    keeps whole blocks only pays for its last, partial block here, as it does in time. None where the server tells
    neither.
    """
    by_place = {(record.agent, record.turn): record for record in turns}
    return {place: _recomputed(record, by_place.get((place[0], place[1] - 1))) for place, record in by_place.items()}


def _recomputed(record: TurnRecord, before: TurnRecord | None) -> int | None:
    if record.cost.recomputed_tokens is not None:
        return record.cost.recomputed_tokens
    if record.turn == 0:
        return 0
    if record.cost.cached_tokens is None or before is None:
        return None
    computed = before.cost.prompt_tokens + before.cost.completion_tokens - 1
    return max(0, computed - record.cost.cached_tokens)
