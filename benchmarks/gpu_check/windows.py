"""Tokens a second of sessions that decode together. Pure, but for the type of a turn."""

from collections.abc import Sequence

from benchmarks.gpu_check.live import LiveTurn

WARM_UP_TOKENS = 3
"""Of every turn, that are not counted: a step with another's prompt in it is no decode step."""


def decode_rate(turns: Sequence[LiveTurn]) -> float:
    """Tokens a second from the moment when every turn has had its first few tokens until the first turn ends."""
    begin = max(turn.times[WARM_UP_TOKENS - 1] for turn in turns)
    end = min(turn.times[-1] for turn in turns)
    counted = sum(1 for turn in turns for time in turn.times if begin < time <= end)
    return counted / (end - begin)
