"""Where in a history its last few tokens stood before: prompt lookup (Saxena, 2023), without a search."""

from collections.abc import Sequence

ORDERS = (4, 2, 1)
"""Tokens that have to be the same, the longest first."""
LONGEST = 16
"""Tokens before a place that are compared at most."""
MAX_INDEXED = 1 << 13
"""Tokens of a history that are indexed when its index is made, while all sessions wait: about 300 bytes and half a
microsecond each.
"""


class NgramIndex:
    """For each n-gram of a history that only grows, the place after the last one that has a token behind it."""

    def __init__(self) -> None:
        self._places: dict[int, dict[tuple[int, ...], int]] = {order: {} for order in ORDERS}
        self._end: int | None = None
        """N-grams that end before it have been indexed; None: none has."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take up the tokens that the history has got since the last call."""
        first = max(0, len(tokens) - MAX_INDEXED) if self._end is None else self._end
        for order, places in self._places.items():
            ends = range(max(first, order), len(tokens))
            if ends:
                grams = zip(
                    *(tokens[end - order : end - order + len(ends)] for end in range(ends[0], ends[0] + order)),
                    strict=True,
                )
                places.update(zip(grams, ends, strict=True))
        self._end = len(tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The place before the end where most recently the same n-gram ended, and how many tokens before it are those
        before the end, at most `LONGEST`. (0, 0) if there is none. The history has been taken up.
        """
        for order, places in self._places.items():
            place = places.get(tuple(tokens[-order:]))
            if place is not None:
                return place, _same_before(tokens, place)
        return 0, 0


def follow(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """The `count` tokens that stood at `place`. Those that run past the end go on with themselves: a history that
    repeats itself is expected to do so again.
    """
    period = len(tokens) - place
    return [tokens[place + offset % period] for offset in range(count)]


def _same_before(tokens: Sequence[int], place: int) -> int:
    """How many tokens before `place` are those before the end."""
    length = 0
    while length < min(place, LONGEST) and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
