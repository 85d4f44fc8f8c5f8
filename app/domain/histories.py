"""Token histories."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TypeVar

TokenIds = TypeVar("TokenIds", "array[int]", tuple[int, ...])
"""What can be compared a part at a time, without a step of Python for each token."""


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """How many tokens `a` and `b` begin with in common; nearly always all of one of them."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return bisect_left(range(shorter), True, key=lambda length: a[: length + 1] != b[: length + 1])
