"""Random numbers from a key and a counter, with no state between them: Philox4x64-10 (Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", SC 2011), as NumPy's `Philox` computes it.

To make a generator of NumPy's for one number takes two and a half times as long.
"""

_WORD = (1 << 64) - 1
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_INCREMENTS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS = 10
_DOUBLE = 2.0**-53


def uniform(key: int, counter: int) -> float:
    """What `numpy.random.Generator(numpy.random.Philox(key=key, counter=counter)).random()` returns: from 0 to below 1.

    `key` is less than 2^128, `counter` less than 2^256.
    """
    counter += 1
    a, b, c, d = (counter >> shift & _WORD for shift in (0, 64, 128, 192))
    first, second = key & _WORD, key >> 64
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = right >> 64 ^ b ^ first, right & _WORD, left >> 64 ^ d ^ second, left & _WORD
        first, second = first + _INCREMENTS[0] & _WORD, second + _INCREMENTS[1] & _WORD
    return (a >> 11) * _DOUBLE
