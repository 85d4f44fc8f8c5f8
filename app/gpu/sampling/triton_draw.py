"""Triton kernels that draw tokens: of all in a row, and of the most probable ones without sorting them.

Sorted by probability, and by id where that is equal, the tokens that `top_k`, `top_p` and `min_p` leave are the first
ones: all above a probability, and some of those at it. The bits of positive floats are ordered as the floats are, so
such a probability is found digit by digit, as radix selection does (Alabi et al., "Fast K-Selection Algorithms for
Graphics Processing Units", 2012), and the drawn token by the mass before it. Masses are integers: their sum is exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 1024, 8
"""Tokens that a program looks at together. Each thread counts for every value of a digit."""
WHOLE = tl.constexpr(2.0**60)
"""A probability of 1 as a mass: there is room for the sum, and float32 keeps all its bits down to 2^-37."""
DIGIT_BITS, VALUES = tl.constexpr(3), tl.constexpr(8)
DIGITS = tl.constexpr(10)
"""Of the bits of a float32 from 0 to 1."""


def draw(probabilities: Tensor, uniforms: Tensor, *limits: Tensor) -> Tensor:
    """One token for each row, `[draws]` int64. `probabilities` `[draws, vocab_size]` is float32, dense; `uniforms`
    `[draws, 1]` float64 are from 0 to below 1.

    `limits` are `top_k` int64, `top_p` and `min_p` float32, each `[draws, 1]`. Without them any token may be drawn.
    """
    rows, vocab_size = probabilities.shape
    kernel, chosen = _draw if limits else _draw_any, torch.empty(rows, dtype=torch.int64, device=probabilities.device)
    with torch.cuda.device_of(probabilities):
        kernel[(rows,)](probabilities, uniforms, *limits, chosen, vocab_size, tile=TILE, num_warps=WARPS)
    return chosen


@triton.jit(do_not_specialize=["vocab_size"])
def _draw_any(
    probabilities: tl.tensor, uniforms: tl.tensor, chosen: tl.tensor, vocab_size: tl.tensor, tile: tl.constexpr
) -> None:
    """One program draws for one row: the token at whose mass the running sum passes the uniform's share of it all."""
    number = tl.program_id(0)
    row = probabilities + number.to(tl.int64) * vocab_size
    _highest, total = _survey(row, vocab_size, tile)
    target = tl.minimum((tl.load(uniforms + number) * total.to(tl.float64)).to(tl.int64), total - 1)
    before, found = total * 0, total * 0
    for start in range(0, vocab_size, tile):
        token = start + tl.arange(0, tile)
        mass = _mass(_load(row, token, vocab_size))
        up_to = before + tl.cumsum(mass, 0)
        found += tl.sum(tl.where((up_to > target) & (up_to - mass <= target), token, 0), 0)
        before += tl.sum(mass, 0)
    tl.store(chosen + number, found)


@triton.jit(do_not_specialize=["vocab_size"])
def _draw(
    probabilities: tl.tensor,
    uniforms: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    chosen: tl.tensor,
    vocab_size: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """One program draws for one row. Tokens above the bits `edge` are left, and the first `ties` of those at it."""
    number = tl.program_id(0)
    row = probabilities + number.to(tl.int64) * vocab_size
    limit = tl.load(top_k + number)
    highest, total = _survey(row, vocab_size, tile)
    edge, ties = highest * 0, limit * 0 + vocab_size
    if limit < vocab_size:
        edge = _search(row, vocab_size, limit, False, tile)
        count, mass = _above(row, vocab_size, edge, tile)
        ties = limit - count
        total = mass + ties * _mass(edge)
    share = tl.load(top_p + number)
    if share < 1:
        bound = tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        bound = tl.minimum(tl.maximum(bound, 1), total)
        passed = _search(row, vocab_size, bound, True, tile)
        count, mass = _above(row, vocab_size, passed, tile)
        kept = (bound - mass + _mass(passed) - 1) // _mass(passed)
        ties = tl.where(passed > edge, kept, tl.minimum(ties, kept))
        edge = passed
    least = (tl.load(min_p + number) * highest.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    ties = tl.where(least > edge, vocab_size, ties)
    edge = tl.maximum(edge, least)
    # The token at the uniform's share of the mass of those that are left.
    count, mass = _above(row, vocab_size, edge, tile)
    count_to_edge, _mass_to_edge = _above(row, vocab_size, edge - 1, tile)
    total = mass + tl.minimum(ties, count_to_edge - count) * _mass(edge)
    target = tl.minimum((tl.load(uniforms + number) * total.to(tl.float64)).to(tl.int64), total - 1)
    found = _search(row, vocab_size, target + 1, True, tile)
    count, mass = _above(row, vocab_size, found, tile)
    tl.store(chosen + number, _nth(row, vocab_size, found, (target - mass) // _mass(found), tile))


@triton.jit
def _load(row: tl.tensor, token: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Bits of probabilities. What is no number counts as 0: a row of such draws token 0, and its turn fails later."""
    share = tl.load(row + token, mask=token < vocab_size, other=0.0)
    return tl.where(share == share, share, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def _mass(bits: tl.tensor) -> tl.tensor:
    return (bits.to(tl.float32, bitcast=True) * WHOLE).to(tl.int64)


@triton.jit
def _survey(row: tl.tensor, vocab_size: tl.tensor, tile: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The highest bits in the row, and the mass of all of it."""
    highest, mass = tl.zeros([tile], tl.int32), tl.zeros([tile], tl.int64)
    for start in range(0, vocab_size, tile):
        token = start + tl.arange(0, tile)
        bits = _load(row, token, vocab_size)
        highest = tl.maximum(highest, bits)
        mass += _mass(bits)
    return tl.max(highest, 0), tl.sum(mass, 0)


@triton.jit
def _above(row: tl.tensor, vocab_size: tl.tensor, edge: tl.tensor, tile: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """How many tokens have higher bits than `edge`, and their mass."""
    count, mass = tl.zeros([tile], tl.int64), tl.zeros([tile], tl.int64)
    for start in range(0, vocab_size, tile):
        token = start + tl.arange(0, tile)
        bits = _load(row, token, vocab_size)
        is_above = (bits > edge) & (token < vocab_size)
        count += is_above.to(tl.int64)
        mass += tl.where(is_above, _mass(bits), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _search(
    row: tl.tensor, vocab_size: tl.tensor, bound: tl.tensor, by_mass: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:
    """The highest bits that tokens with as many or higher reach `bound` with, in number or in mass."""
    found = (bound * 0).to(tl.int32)
    for place in range(DIGITS):
        shift = DIGIT_BITS * (DIGITS - 1 - place)
        pivots = found + (tl.arange(0, VALUES) << shift)
        reached = tl.zeros([tile, VALUES], tl.int64)
        for start in range(0, vocab_size, tile):
            token = start + tl.arange(0, tile)
            bits = _load(row, token, vocab_size)
            weight = _mass(bits) if by_mass else (token < vocab_size).to(tl.int64)
            reached += tl.where(bits[:, None] >= pivots[None, :], weight[:, None], 0)
        digit = tl.sum((tl.sum(reached, 0) >= bound).to(tl.int32), 0) - 1
        found += (digit << shift).to(tl.int32)
    return found


@triton.jit
def _nth(row: tl.tensor, vocab_size: tl.tensor, wanted: tl.tensor, n: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """The id of the token number `n`, from 0 on, among those with the bits `wanted`."""
    seen, found = n * 0, n * 0
    for start in range(0, vocab_size, tile):
        token = start + tl.arange(0, tile)
        bits = _load(row, token, vocab_size)
        matches = ((bits == wanted) & (token < vocab_size)).to(tl.int64)
        rank = seen + tl.cumsum(matches, 0) - 1
        found += tl.sum(tl.where((matches == 1) & (rank == n), token, 0), 0)
        seen += tl.sum(matches, 0)
    return found
