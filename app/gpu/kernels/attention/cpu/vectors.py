"""What the CPU's attention of prompts does with vectors: copies, and an online softmax.

LLVM cannot know that two of Numba's arrays do not overlap: it would take one number after the other.
"""

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from app.gpu.kernels.attention.cpu.queries import LOWEST
from app.gpu.kernels.cpu.intrinsics import FLOAT, INT64, LEAST_EXPONENT, Lanes, instruction
from app.gpu.kernels.cpu.tiles import LANES, round_to_pairs


@instruction(lambda array, *_: types.void(array, *[types.int64] * 3))
def widen_run(builder: Any, kinds: Any, array: Any, source: Any, target: Any, count: Any) -> None:
    """`widen_run(array, source, target, count)`: `count` numbers of the array's type (see `widen`) at address `source`
    as float32 at address `target`. Those of float8 are followed by their scale, and multiplied by it.
    """
    dtype = kinds[0].dtype
    scalar = FLOAT if dtype == types.float32 else ir.IntType(dtype.bitwidth)
    scale = Lanes(builder).load(builder.add(source, count), FLOAT, INT64(0)) if dtype == types.uint8 else None
    for code, index in _runs(builder, count):
        numbers = code.widen(dtype, code.load(source, scalar, index))
        code.store(numbers if scale is None else builder.fmul(numbers, code.spread(scale)), target, FLOAT, index)


@instruction(types.void(*[types.int64] * 4))
def round_run(builder: Any, first: Any, second: Any, target: Any, count: Any) -> None:
    """`round_run(first, second, target, count)`: the `count` float32 at address `first`, each with the one of
    `second`, as pairs of bfloat16 at address `target`, which may be that of the numbers.
    """
    for code, index in _runs(builder, count):
        left, right = (code.load(start, FLOAT, index) for start in (first, second))
        code.store(round_to_pairs(code, left, right), target, FLOAT, index)


def _runs(builder: Any, count: Any) -> Iterator[tuple[Lanes, Any]]:
    """Write loops over `count` numbers: what is done with a vector from an index on, and then with a single one."""
    whole = builder.and_(count, INT64(-LANES))
    for lanes, begin, end in ((LANES, INT64(0), whole), (1, whole, count)):
        with cgutils.for_range_slice(builder, begin, end, INT64(lanes)) as (index, _):
            yield Lanes(builder, lanes), index


def make_softmax(keys: int, *, rounded: bool) -> Any:
    """`softmax(scores, scores_bytes, state, state_bytes, width)`, for `LANES` queries and `keys` keys.

    At address `scores` are `keys` vectors, `scores_bytes` apart; they become weights, relative to the highest score so
    far: 0 for `LOWEST`. If they are `rounded`, the first half of the vectors becomes pairs of bfloat16, of two keys
    each. At address `state`, `state_bytes` apart, are `width` vectors of sums, one of peaks and one of totals; all are
    made to fit the new peaks, and the weights, as they were before rounding, are added to the totals.
    """

    @instruction(types.void(*[types.int64] * 5))
    def softmax(builder: Any, scores: Any, scores_bytes: Any, state: Any, state_bytes: Any, width: Any) -> None:
        code = Lanes(builder, LANES)

        def line(start: Any, stride: Any, index: Any) -> Any:
            return builder.inttoptr(builder.add(start, builder.mul(stride, index)), code.floats.as_pointer())

        def load(place: Any) -> Any:
            return builder.load(place, align=4)

        def power(x: Any) -> Any:
            return code.exp2(code.maximum(x, code.constant(code.floats, float(LEAST_EXPONENT))))

        lines = [line(scores, scores_bytes, INT64(key)) for key in range(keys)]
        peaks, totals = (line(state, state_bytes, builder.add(width, INT64(after))) for after in (0, 1))
        earlier = load(peaks)
        highest = [earlier, *(load(each) for each in lines)]
        while len(highest) > 1:  # in pairs, so that no maximum waits for all before it
            pairs = [code.maximum(*highest[i : i + 2]) for i in range(0, len(highest) - 1, 2)]
            highest = [*pairs, *highest[len(highest) // 2 * 2 :]]
        [peak] = highest
        shrink = power(builder.fsub(earlier, peak))
        total = builder.fmul(load(totals), shrink)
        weights: list[Any] = []
        for place in lines:
            score = load(place)
            seen = builder.fcmp_ordered(">", score, code.constant(code.floats, float(LOWEST)))
            weight = builder.select(seen, power(builder.fsub(score, peak)), code.constant(code.floats, 0.0))
            weights.append(weight)
            total = builder.fadd(total, weight)
            if not rounded:
                builder.store(weight, place, align=4)
            elif len(weights) % 2 == 0:
                pair = builder.bitcast(round_to_pairs(code, *weights[-2:]), code.floats)
                builder.store(pair, lines[len(weights) // 2 - 1], align=4)
        builder.store(peak, peaks, align=4)
        builder.store(total, totals, align=4)
        changed = builder.fcmp_ordered("<", shrink, code.constant(code.floats, 1.0))
        bits = ir.IntType(LANES)
        is_any = builder.icmp_unsigned("!=", builder.bitcast(changed, bits), bits(0))
        with builder.if_then(is_any), cgutils.for_range(builder, width) as loop:
            sums = line(state, state_bytes, loop.index)
            builder.store(builder.fmul(load(sums), shrink), sums, align=4)

    return softmax
