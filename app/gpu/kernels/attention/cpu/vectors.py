"""What the CPU's attention does with vectors, as intrinsics of Numba's functions: copies, and an online softmax.

Numba has no vectors, and LLVM cannot know that two arrays do not overlap: it would take one number after the other.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from app.gpu.kernels.attention.cpu.scores import LEAST_EXPONENT, LOWEST
from app.gpu.kernels.cpu.intrinsics import widened_float8
from app.gpu.kernels.linear.cpu.pairs import round_to_pairs
from app.gpu.kernels.linear.cpu.tile import LANES
from app.gpu.kernels.linear.cpu.weights import Dense

_INT32, _INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTEGERS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)
_EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
"""Of the polynomial for 2 to the x, -0.5 <= x <= 0.5, from the highest power down (Cephes' exp2f)."""


def make_softmax(keys: int, *, rounded: bool = False) -> Any:
    """`softmax(scores, scores_bytes, state, state_bytes, width)`, an intrinsic for `LANES` queries and `keys` keys.

    At address `scores` are `keys` vectors, `scores_bytes` apart; they become weights, relative to the highest score so
    far: 0 for `LOWEST`. If they are `rounded`, the first half of the vectors becomes pairs of bfloat16, of two keys
    each. At address `state`, `state_bytes` apart, are `width` vectors of sums, one of peaks and one of totals; all are
    made to fit the new peaks, and the weights, as they were before rounding, are added to the totals.
    """

    def softmax(typing: Any, scores: Any, scores_bytes: Any, state: Any, state_bytes: Any, width: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _Softmax(builder, keys, rounded=rounded).generate(*arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return intrinsic(softmax)


def _widen_run(typing: Any, element: Any, source: Any, target: Any, count: Any) -> Any:
    """`widen_run(element, source, target, count)`: `count` numbers of the type `element` (see `widen`) at address
    `source` as float32 at address `target`. Those of float8 are followed by their scale, and multiplied by it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, target, count = arguments
        scaled = element.dtype == types.uint8
        scale = _load_scale(builder, builder.add(source, count)) if scaled else None
        for lanes, begin in ((LANES, ir.Constant(_INT64, 0)), (1, _whole(builder, count))):
            floats = ir.VectorType(_FLOAT, lanes)
            end = _whole(builder, count) if lanes > 1 else count
            step = ir.Constant(_INT64, lanes)
            with cgutils.for_range_slice(builder, begin, end, step) as (index, _):
                if scaled:
                    numbers = _read_float8(builder, builder.add(source, index), lanes, scale)
                else:
                    (numbers,) = Dense(element.dtype, builder, lanes, 1).run(source, index)
                place = builder.gep(builder.inttoptr(target, _FLOAT.as_pointer()), [index])
                builder.store(numbers, builder.bitcast(place, floats.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(element, *[types.int64] * 3), generate


def _load_scale(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _FLOAT.as_pointer()), align=1)


def _read_float8(builder: Any, address: Any, lanes: int, scale: Any) -> Any:
    """A vector of `lanes` numbers, times `scale`."""
    codes = builder.load(builder.inttoptr(address, ir.VectorType(ir.IntType(8), lanes).as_pointer()), align=1)
    scales = ir.Constant(ir.VectorType(_FLOAT, lanes), ir.Undefined)
    for lane in range(lanes):
        scales = builder.insert_element(scales, scale, ir.Constant(_INT32, lane))
    return builder.fmul(widened_float8(builder, codes, lambda kind: ir.VectorType(kind, lanes)), scales)


def _whole(builder: Any, count: Any) -> Any:
    """`count` without what is no whole vector."""
    return builder.and_(count, ir.Constant(_INT64, -LANES))


def _round_run(typing: Any, first: Any, second: Any, target: Any, count: Any) -> Any:
    """`round_run(first, second, target, count)`: the `count` float32 at address `first`, each with the one of `second`,
    as pairs of bfloat16 at address `target`, which may be that of the numbers.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, second, target, count = arguments
        for lanes, begin in ((LANES, ir.Constant(_INT64, 0)), (1, _whole(builder, count))):
            end = _whole(builder, count) if lanes > 1 else count
            with cgutils.for_range_slice(builder, begin, end, ir.Constant(_INT64, lanes)) as (index, _):
                places = [_vector_at(builder, start, index, lanes) for start in (first, second, target)]
                left, right = (builder.load(place, align=4) for place in places[:2])
                pairs = round_to_pairs(builder, left, right)
                builder.store(builder.bitcast(pairs, left.type), places[2], align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _vector_at(builder: Any, start: Any, index: Any, lanes: int) -> Any:
    """The place of `lanes` floats from number `index` on of those at address `start`."""
    place = builder.gep(builder.inttoptr(start, _FLOAT.as_pointer()), [index])
    return builder.bitcast(place, ir.VectorType(_FLOAT, lanes).as_pointer())


widen_run: Any = intrinsic(_widen_run)
round_run: Any = intrinsic(_round_run)


class _Softmax:
    def __init__(self, builder: Any, keys: int, *, rounded: bool) -> None:
        self._builder, self._keys, self._rounded = builder, keys, rounded

    def generate(self, scores: Any, scores_bytes: Any, state: Any, state_bytes: Any, width: Any) -> None:
        builder = self._builder
        lines = [self._line(scores, scores_bytes, ir.Constant(_INT64, key)) for key in range(self._keys)]
        peaks = self._line(state, state_bytes, width)
        totals = self._line(state, state_bytes, builder.add(width, ir.Constant(_INT64, 1)))
        earlier = self._load(peaks)
        peak = self._highest([earlier, *(self._load(line) for line in lines)])
        shrink = self._exp2(builder.fsub(earlier, peak))
        total = builder.fmul(self._load(totals), shrink)
        weights = []
        for line in lines:
            weights.append(self._weigh(line, peak))
            total = builder.fadd(total, weights[-1])
            if not self._rounded:
                self._store(weights[-1], line)
            elif len(weights) % 2 == 0:
                pairs = round_to_pairs(builder, *weights[-2:])
                self._store(builder.bitcast(pairs, _FLOATS), lines[len(weights) // 2 - 1])
        self._store(peak, peaks)
        self._store(total, totals)
        changed = builder.fcmp_ordered("<", shrink, self._splat(1.0))
        with builder.if_then(self._any(changed)), cgutils.for_range(builder, width) as loop:
            sums = self._line(state, state_bytes, loop.index)
            self._store(builder.fmul(self._load(sums), shrink), sums)

    def _weigh(self, line: Any, peak: Any) -> Any:
        builder = self._builder
        score = self._load(line)
        seen = builder.fcmp_ordered(">", score, self._splat(float(LOWEST)))
        return builder.select(seen, self._exp2(builder.fsub(score, peak)), self._splat(0.0))

    def _highest(self, vectors: Sequence[Any]) -> Any:
        """In pairs, so that no maximum waits for all before it."""
        while len(vectors) > 1:
            pairs = [self._maximum(*vectors[i : i + 2]) for i in range(0, len(vectors) - 1, 2)]
            vectors = [*pairs, *vectors[len(vectors) // 2 * 2 :]]
        return vectors[0]

    def _maximum(self, left: Any, right: Any) -> Any:
        return self._builder.select(self._builder.fcmp_ordered(">", left, right), left, right)

    def _exp2(self, x: Any) -> Any:
        """2 to the `x`, which is at most 0, to about 2e-7; what is below the least normal number becomes that."""
        builder = self._builder
        x = self._maximum(x, self._splat(float(LEAST_EXPONENT)))
        whole = self._call("rint", x)
        part = builder.fsub(x, whole)
        y = self._splat(_EXP2[0])
        for coefficient in _EXP2[1:]:
            y = self._call("fma", y, part, self._splat(coefficient))
        exponent = builder.add(builder.fptosi(whole, _INTEGERS), ir.Constant(_INTEGERS, [127] * LANES))
        power = builder.bitcast(builder.shl(exponent, ir.Constant(_INTEGERS, [23] * LANES)), _FLOATS)
        return builder.fmul(y, power)

    def _call(self, name: str, *vectors: Any) -> Any:
        function_type = ir.FunctionType(_FLOATS, [_FLOATS] * len(vectors))
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            self._builder.module, function_type, f"llvm.{name}.v{LANES}f32"
        )
        return self._builder.call(function, vectors)

    def _any(self, mask: Any) -> Any:
        bits = self._builder.bitcast(mask, ir.IntType(LANES))
        return self._builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))

    def _splat(self, number: float) -> Any:
        return ir.Constant(_FLOATS, [number] * LANES)

    def _line(self, start: Any, stride: Any, index: Any) -> Any:
        address = self._builder.add(start, self._builder.mul(stride, index))
        return self._builder.inttoptr(address, _FLOATS.as_pointer())

    def _load(self, place: Any) -> Any:
        return self._builder.load(place, align=4)

    def _store(self, vector: Any, place: Any) -> None:
        self._builder.store(vector, place, align=4)
