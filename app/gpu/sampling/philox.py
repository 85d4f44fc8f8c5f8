"""Random numbers from keys and counters, with no state between them: Philox4x64-10 (Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", SC 2011), as NumPy's `Philox` computes it.

All numbers of a step are computed at once, each in 128 bits of Python's long integers: 64 bits times 64 bits fit there.
To make a generator of NumPy's for one number takes longer than a hundred of them.
"""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LANE_BYTES, _WORD_BITS = 16, 64
_WORD = (1 << _WORD_BITS) - 1
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_INCREMENTS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS = 10
_SPARE_BITS = np.uint64(11)
_DOUBLE = 2.0**-53


def uniforms(keys: Sequence[int], counters: Sequence[int]) -> NDArray[np.float64]:
    """For each key and counter what `numpy.random.Generator(numpy.random.Philox(key=key, counter=counter)).random()`
    returns, from 0 to below 1: `[keys]`.

    Keys are less than 2^128, counters less than 2^64 - 1.
    """
    ones, words = _constants(len(keys))
    packed = _pack(keys)
    first, second = packed & words, packed >> _WORD_BITS & words
    steps = ones * _INCREMENTS[0], ones * _INCREMENTS[1]
    a, b, c, d = _pack(counters) + ones, 0, 0, 0
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b = (right >> _WORD_BITS ^ b ^ first) & words, right & words
        c, d = (left >> _WORD_BITS ^ d ^ second) & words, left & words
        first, second = first + steps[0], second + steps[1]  # above its word, nobody looks; a lane has room for all
    lanes = np.frombuffer(a.to_bytes(_LANE_BYTES * len(keys), "little"), np.uint64)
    return (lanes[::2] >> _SPARE_BITS).astype(np.float64) * _DOUBLE


@functools.lru_cache(maxsize=256)
def _constants(lanes: int) -> tuple[int, int]:
    """A 1 in each lane, and a word of ones."""
    ones = _pack([1] * lanes)
    return ones, ones * _WORD


def _pack(numbers: Sequence[int]) -> int:
    """The numbers side by side, the first of them lowest."""
    return int.from_bytes(b"".join([number.to_bytes(_LANE_BYTES, "little") for number in numbers]), "little")
