"""The innermost loops of products and of attention, as functions of Numba's: tiles of sums that stay in registers.

Weights are read in panels: of each input, `PANEL` outputs lie beside each other, in one of three ways:

- Dense, `[inputs, PANEL]`: float32, or half types as `intrinsics.widen` has them.
- In pairs, `HALVES`: bfloat16, two inputs of each output at a time.
- In blocks: a run of records, one for each group of inputs, see `linear.formats`. A weight is
  `scale * quant + offset`, rounded once, or `scale * (quant - zero)`, which may be rounded to a half type.

What stands for a weight's type is `element`, in Numba's code and here. Numba has no vectors: what LLVM makes of scalar
loops keeps one sum in many parts, which depend on how it unrolls, and it cannot know that arrays do not overlap.
"""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from app.gpu.kernels.cpu.compile import compiled_features
from app.gpu.kernels.cpu.intrinsics import (
    CACHE_LINE,
    FLOAT,
    HALF,
    INT32,
    INT64,
    LEAST_EXPONENT,
    Lanes,
    instruction,
    prefetch_line,
)

PANEL = 32
"""Outputs whose weights lie beside each other for each input: the cache lines of one load or two."""
HALVES = np.dtype([("halves", np.uint16, (PANEL, 2))])
"""A record of a panel: two bfloat16 of each output, of two inputs that follow each other."""
ROUNDED, PAIRS = "rounded_", "pairs"
"""How the name of the quants, a block's last field, begins if weights become bfloat16, and ends if a byte has two."""
FLOAT4, FLOAT8 = "float4_", "float8_"
"""How that name goes on if quants are no integers, but E2M1, or E4M3."""
TO_BFLOAT16, TO_FLOAT16 = "scales_to_bfloat16", "scales_to_float16"
"""The name of the scales, a block's first field, if weights are rounded to such a type."""
LOWEST = np.float32(-3e38)
"""The score of a key that a query does not see."""
_DOT_LANES = 16
_AHEAD = 32768
"""Bytes. Measured over the linears of a 135M Llama on AVX512_BF16, two cores: 0.75 of the time at 16 and 32 rows, 0.87
at 256. With up to four rows the processor's own prefetcher is faster, which ours disturbs."""
_INT8, _INT16 = ir.IntType(8), ir.IntType(16)

Terms = Iterator[tuple[Any, list[Any]]]
"""Writes a loop over terms of a product: its number, an int64, and the vectors of weights that it meets. What is
written before the next one is asked for is inside the loop. A term is an input, and weights are float32; or for
`takes_pairs` it is a pair of inputs, and weights are bfloat16 in pairs.
"""


def _shape_of_tiles() -> tuple[int, int, int]:
    """Rows of a tile, vectors of a row, lanes of a vector: as many sums as there are registers for."""
    features = compiled_features()
    if "avx512f" in features:
        return 12, 2, 16
    return (6, 2, 8) if "avx2" in features else (6, 2, 4)


ROWS, _VECTORS, LANES = _shape_of_tiles()
COLUMNS = _VECTORS * LANES
"""Outputs of a tile; they divide a panel."""


def multiplies_pairs() -> bool:
    """Whether kernels are compiled for a processor with an instruction for it: `vdpbf16ps` of AVX512_BF16 multiplies
    two pairs and adds both products to a float32 sum (Intel 64 and IA-32 Architectures Software Developer's Manual,
    volume 2). Others make the same sums of float32 multiply-adds, more slowly; their last bits may differ.
    """
    return "avx512bf16" in compiled_features()


def takes_pairs(element: Any) -> bool:
    """Whether inputs are bfloat16, in pairs, where they meet weights of Numba's type `element`."""
    return _is_paired(element.dtype) or _quants_of(element.dtype).startswith(ROUNDED)


def _is_paired(dtype: Any) -> bool:
    return isinstance(dtype, types.Record) and "halves" in dtype.fields


def _quants_of(dtype: Any) -> str:
    """The name of the last field of a block, or nothing."""
    return str([*dtype.fields][-1]) if isinstance(dtype, types.Record) else ""


def load_weights(
    code: Lanes, element: Any, vectors: int, weight: Any, column: Any, inputs: Any, *, ahead: bool
) -> Terms:
    """Unpack from the panel at `weight`, of Numba's type `element`, `vectors` vectors of outputs from `column` on."""
    builder, dtype = code.builder, element.dtype
    if _is_paired(dtype):
        with cgutils.for_range(builder, builder.sdiv(inputs, INT64(2))) as loop:
            line = builder.add(weight, builder.mul(loop.index, INT64(PANEL * 4)))
            if ahead:
                _prefetch_run(builder, builder.add(line, INT64(_AHEAD)), PANEL * 4)
            yield loop.index, _load(code, vectors, line, INT32, column)
    elif isinstance(dtype, types.Record):
        yield from _load_blocks(code, dtype, vectors, weight, column, inputs, ahead)
    else:
        scalar = FLOAT if dtype == types.float32 else ir.IntType(dtype.bitwidth)
        with cgutils.for_range(builder, inputs) as loop:
            line = builder.add(weight, builder.mul(loop.index, INT64(PANEL * dtype.bitwidth // 8)))
            yield loop.index, [code.widen(dtype, each) for each in _load(code, vectors, line, scalar, column)]


def _load_blocks(code: Lanes, dtype: Any, vectors: int, weight: Any, column: Any, inputs: Any, ahead: bool) -> Terms:
    builder, name = code.builder, _quants_of(dtype)
    quants, scaled = dtype.typeof(name), str(next(iter(dtype.fields)))
    in_pairs = name.endswith(PAIRS)
    pairs, lines = (quants.shape[0], 1) if in_pairs else (quants.shape[0] // 2, 2)
    groups = builder.sdiv(inputs, INT64(2 * pairs))
    with cgutils.for_range(builder, groups) as group:
        record = builder.add(weight, builder.mul(group.index, INT64(dtype.size)))
        scales = _load_scales(code, dtype, vectors, record, scaled, column)
        offsets = _load_scales(code, dtype, vectors, record, "offsets", column)
        zeros: list[Any] = [None] * vectors
        if "zeros" in dtype.fields:
            start = builder.add(record, INT64(dtype.fields["zeros"].offset))
            zeros = _extend(code, _load(code, vectors, start, _INT8, column), signed=True)
        if ahead:
            _prefetch_run(builder, builder.add(record, builder.mul(groups, INT64(dtype.size))), dtype.size)
        first = builder.mul(group.index, INT64(pairs))
        begin = builder.add(record, INT64(dtype.fields[name].offset))
        with cgutils.for_range(builder, INT64(pairs)) as loop:
            place = builder.add(begin, builder.mul(loop.index, INT64(lines * PANEL)))
            loaded: list[list[Any]] = []
            for line in range(lines):
                run = _load(code, vectors, builder.add(place, INT64(line * PANEL)), _INT8, column)
                if FLOAT8 in name:
                    loaded.append([code.widen(types.uint8, each) for each in run])
                    continue
                signed = quants.dtype.signed
                numbers = _split(code, run, signed) if in_pairs else [_extend(code, run, signed)]
                loaded += [
                    [_number(code, name, quant, zero) for quant, zero in zip(each, zeros, strict=True)]
                    for each in numbers
                ]
            left, right = (
                [
                    _rounded_to(code, scaled, code.multiply_add(scale, number, offset))
                    for scale, number, offset in zip(scales, each, offsets, strict=True)
                ]
                for each in loaded
            )
            pair = builder.add(first, loop.index)
            if name.startswith(ROUNDED):
                yield pair, [round_to_pairs(code, *each) for each in zip(left, right, strict=True)]
            else:
                term = builder.mul(pair, INT64(2))
                yield term, left
                yield builder.add(term, INT64(1)), right


def _number(code: Lanes, name: str, quant: Any, zero: Any) -> Any:
    """What a vector of quants, int32, stands for, float32."""
    builder = code.builder
    if FLOAT4 in name:  # as float16 the same bits stand for the number over 2 ** 14
        sign = builder.shl(builder.and_(quant, code.constant(code.integers, 8)), code.constant(code.integers, 12))
        size = builder.shl(builder.and_(quant, code.constant(code.integers, 7)), code.constant(code.integers, 9))
        halves = builder.bitcast(builder.trunc(builder.or_(sign, size), code.of(_INT16)), code.of(HALF))
        return builder.fmul(builder.fpext(halves, code.floats), code.constant(code.floats, 16384.0))
    return builder.sitofp(quant if zero is None else builder.sub(quant, zero), code.floats)


def _rounded_to(code: Lanes, scaled: str, weights: Any) -> Any:
    """Float32 numbers, to nearest even in the type that the name of their scales says."""
    builder = code.builder
    if scaled == TO_FLOAT16:
        return builder.fpext(builder.fptrunc(weights, code.of(HALF)), code.floats)
    if scaled == TO_BFLOAT16:
        return builder.bitcast(
            builder.and_(code.rounded_up(weights), code.constant(code.integers, -65536)), code.floats
        )
    return weights


def _load_scales(code: Lanes, dtype: Any, vectors: int, record: Any, name: str, column: Any) -> list[Any]:
    """The outputs', as float32. -0.0 stands for offsets that are not there: it keeps even the sign of a zero."""
    if name not in dtype.fields:
        return [code.constant(code.floats, -0.0)] * vectors
    kept = dtype.typeof(name).dtype
    start = code.builder.add(record, INT64(dtype.fields[name].offset))
    if kept == types.uint16:
        return [code.widen(kept, each) for each in _load(code, vectors, start, _INT16, column)]
    scalar = HALF if kept == types.float16 else FLOAT
    loaded = _load(code, vectors, start, scalar, column)
    return loaded if scalar is FLOAT else [code.builder.fpext(each, code.floats) for each in loaded]


def _extend(code: Lanes, run: list[Any], signed: bool) -> list[Any]:
    extend = code.builder.sext if signed else code.builder.zext
    return [extend(each, code.integers) for each in run]


def _split(code: Lanes, run: list[Any], signed: bool) -> list[list[Any]]:
    """The quants of two inputs, which share bytes."""
    builder, wide = code.builder, _extend(code, run, signed)
    four, top, mask = (code.constant(code.integers, number) for number in (4, 28, 15))
    if signed:
        return [
            [builder.ashr(builder.shl(each, top), top) for each in wide],
            [builder.ashr(each, four) for each in wide],
        ]
    return [[builder.and_(each, mask) for each in wide], [builder.lshr(each, four) for each in wide]]


def _load(code: Lanes, vectors: int, start: Any, scalar: Any, column: Any) -> list[Any]:
    return [code.load(start, scalar, column, place * code.lanes) for place in range(vectors)]


def _prefetch_run(builder: Any, address: Any, nbytes: int) -> None:
    for place in range(0, nbytes, CACHE_LINE):
        prefetch_line(builder, builder.inttoptr(builder.add(address, INT64(place)), _INT8.as_pointer()))


def round_to_pairs(code: Lanes, first: Any, second: Any) -> Any:
    """Two vectors of floats as one of pairs of bfloat16, to nearest even."""
    builder, lanes = code.builder, code.lanes
    if multiplies_pairs() and lanes == _DOT_LANES:
        halves = ir.VectorType(_INT16, 2 * lanes)
        rounded = code.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", halves, second, first)
        order = [place for lane in range(lanes) for place in (lane, lanes + lane)]
        mixed = builder.shuffle_vector(rounded, rounded, ir.Constant(ir.VectorType(INT32, 2 * lanes), order))
        return builder.bitcast(mixed, code.integers)
    low = builder.lshr(code.rounded_up(first), code.constant(code.integers, 16))
    return builder.or_(low, builder.and_(code.rounded_up(second), code.constant(code.integers, -65536)))


def _multiply_pairs(code: Lanes, left: Any, right: Any, addend: Any) -> Any:
    """`addend`, a vector of floats, and the products of both halves of the vectors `left` and `right`."""
    builder = code.builder
    if multiplies_pairs() and code.lanes == _DOT_LANES:
        return code.call("llvm.x86.avx512bf16.dpbf16ps.512", code.floats, addend, left, right)
    halves: list[tuple[Any, int]] = [(builder.shl, 16), (builder.and_, -65536)]
    for take, number in halves:
        one, other = (take(pairs, code.constant(code.integers, number)) for pairs in (left, right))
        addend = code.multiply_add(builder.bitcast(one, code.floats), builder.bitcast(other, code.floats), addend)
    return addend


def make_tile(rows: int, columns: int, *, ahead: bool = False) -> Any:
    """`tile(element, x, x_bytes, step, weight, column, inputs, out, out_bytes, carry)`, for `rows` rows and `columns`
    outputs of a panel, from `column` on.

    Addresses are those of `x` `[rows, inputs]`, of a panel of weights of the type `element`, and of `out`
    `[rows, columns]`; rows of `x` and `out` are `x_bytes` and `out_bytes` apart, and terms of `x` are `step` floats
    apart. `x` is bfloat16 in pairs for weights that `takes_pairs`, all else float32. Each sum begins with zero if
    `carry` is 0, else with the number in `out`, and is made with fused multiply-adds from its first term to its last:
    its bits are those of any other tile, and of any type of weights with the same values that is not in pairs. `ahead`
    prefetches weights where that pays.
    """

    @instruction(lambda element, *_: types.void(element, *[types.int64] * 9))
    def tile(
        builder: Any,
        kinds: Any,
        element: Any,
        x: Any,
        x_bytes: Any,
        step: Any,
        weight: Any,
        column: Any,
        inputs: Any,
        out: Any,
        out_bytes: Any,
        carry: Any,
    ) -> None:
        code, vectors, paired = Lanes(builder, LANES), columns // LANES, takes_pairs(kinds[0])
        starts = [builder.add(x, builder.mul(x_bytes, INT64(row))) for row in range(rows)]
        lines = [builder.inttoptr(start, (INT32 if paired else FLOAT).as_pointer()) for start in starts]
        targets = [builder.add(out, builder.mul(out_bytes, INT64(row))) for row in range(rows)]
        places = [code.place(target, FLOAT, INT64(0), at * LANES) for target in targets for at in range(vectors)]
        with builder.goto_entry_block():
            sums = [builder.alloca(code.floats) for _ in places]
        for total in sums:
            builder.store(code.constant(code.floats, 0.0), total)
        with builder.if_then(builder.icmp_signed("!=", carry, INT64(0))):
            for place, total in zip(places, sums, strict=True):
                builder.store(builder.load(place, align=4), total)

        for term, weights in load_weights(code, kinds[0], vectors, weight, column, inputs, ahead=ahead):
            at = builder.mul(term, step)
            for row, line in enumerate(lines):
                value = code.spread(builder.load(builder.gep(line, [at])))
                for each, total in zip(weights, sums[row * vectors : (row + 1) * vectors], strict=True):
                    terms = value, each, builder.load(total)
                    builder.store(_multiply_pairs(code, *terms) if paired else code.multiply_add(*terms), total)
        for place, total in zip(places, sums, strict=True):
            builder.store(builder.load(total), place, align=4)

    return tile


@instruction(lambda element, *_: types.int64(element, *[types.int64] * 3))
def unpack(builder: Any, kinds: Any, element: Any, weight: Any, inputs: Any, out: Any) -> Any:
    """`unpack(element, weight, inputs, out)`: the address at which the panel at `weight` is float32 `[inputs, PANEL]`,
    or pairs of bfloat16 for weights that are multiplied so: its own, or else `out`.
    """
    code, dtype = Lanes(builder, LANES), kinds[0].dtype
    if dtype == types.float32 or _is_paired(dtype):
        return weight
    scalar = INT32 if takes_pairs(kinds[0]) else FLOAT

    for term, loaded in load_weights(code, kinds[0], PANEL // LANES, weight, INT64(0), inputs, ahead=True):
        line = builder.mul(term, INT64(PANEL))
        for place, values in enumerate(loaded):
            code.store(values, out, scalar, line, place * LANES)
    return out


@instruction(lambda element: types.boolean(element))
def takes_bfloat16(builder: Any, kinds: Any, element: Any) -> Any:
    """`takes_bfloat16(element)`: whether `x` is bfloat16 for weights of that type."""
    return ir.IntType(1)(takes_pairs(kinds[0]))


@instruction(lambda element: types.boolean(element))
def is_in_pairs(builder: Any, kinds: Any, element: Any) -> Any:
    """`is_in_pairs(element)`: whether weights of that type are in blocks with two quants in a byte."""
    return ir.IntType(1)(_quants_of(kinds[0].dtype).endswith(PAIRS))


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


@instruction(types.void(types.int64, types.float32, types.int64, types.int64))
def stream_scaled(builder: Any, source: Any, scale: Any, target: Any, count: Any) -> None:
    """`stream_scaled(source, scale, target, count)`: `count` float32 at address `source`, each times `scale`, to
    address `target`, past the caches.
    """
    for code, index in _lines_of(builder, target, count):
        _stream(code, builder.fmul(code.load(source, FLOAT, index), code.spread(scale)), target, index)


@instruction(types.void(types.int64, types.int64))
def stream_zeros(builder: Any, target: Any, count: Any) -> None:
    """`stream_zeros(target, count)`: `count` float32 of 0 to address `target`, past the caches."""
    for code, index in _lines_of(builder, target, count):
        _stream(code, code.constant(code.floats, 0.0), target, index)


def _stream(code: Lanes, numbers: Any, target: Any, index: Any) -> None:
    """Store numbers as `_lines_of` says: whole vectors without reading what was there (LLVM's `!nontemporal`). Other
    threads see them once this one has drawn its next item, which empties the buffers that they wait in.
    """
    size = 4 * code.lanes
    stored = code.builder.store(numbers, code.place(target, FLOAT, index), align=size)
    if code.lanes > 1:
        stored.set_metadata("nontemporal", code.builder.module.add_metadata([INT32(1)]))


def _lines_of(builder: Any, target: Any, count: Any) -> Iterator[tuple[Lanes, Any]]:
    """Write loops over `count` numbers at address `target`: single ones up to a whole vector's place, vectors, and the
    single ones behind them.
    """
    ahead = builder.and_(builder.ashr(builder.neg(target), INT64(2)), INT64(LANES - 1))
    begin = builder.select(builder.icmp_signed("<", ahead, count), ahead, count)
    end = builder.add(begin, builder.and_(builder.sub(count, begin), INT64(-LANES)))
    for lanes, first, stop in ((1, INT64(0), begin), (LANES, begin, end), (1, end, count)):
        with cgutils.for_range_slice(builder, first, stop, INT64(lanes)) as (index, _):
            yield Lanes(builder, lanes), index


@instruction(types.float32(types.int64, types.int64, types.float32))
def highest(builder: Any, scores: Any, count: Any, least: Any) -> Any:
    """`highest(scores, count, least)`: of whole panels of scores at that address, or `least`."""
    code = Lanes(builder, LANES)
    with builder.goto_entry_block():
        found = [builder.alloca(code.floats) for _ in range(PANEL // LANES)]
    for each in found:
        builder.store(code.spread(least), each)
    with cgutils.for_range_slice(builder, INT64(0), count, INT64(PANEL)) as (index, _):
        for place, each in enumerate(found):  # each depends on itself alone
            score = code.load(scores, FLOAT, index, place * LANES)
            builder.store(code.maximum(builder.load(each), score), each)
    return _folded(code, [builder.load(each) for each in found], code.maximum)


@instruction(types.float32(types.int64, types.int64, types.float32))
def weigh(builder: Any, scores: Any, count: Any, peak: Any) -> Any:
    """`weigh(scores, count, peak)`: whole panels of scores at that address become weights, relative to the highest.
    Returns their sum. None is less than that of `LEAST_EXPONENT`.
    """
    code = Lanes(builder, LANES)
    with builder.goto_entry_block():
        totals = [builder.alloca(code.floats) for _ in range(PANEL // LANES)]
    for total in totals:
        builder.store(code.constant(code.floats, 0.0), total)
    with cgutils.for_range_slice(builder, INT64(0), count, INT64(PANEL)) as (index, _):
        for place, total in enumerate(totals):
            power = builder.fsub(code.load(scores, FLOAT, index, place * LANES), code.spread(peak))
            weight = code.exp2(code.maximum(power, code.constant(code.floats, float(LEAST_EXPONENT))))
            code.store(weight, scores, FLOAT, index, place * LANES)
            builder.store(builder.fadd(builder.load(total), weight), total)
    return _folded(code, [builder.load(total) for total in totals], builder.fadd)


def _folded(code: Lanes, vectors: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """One number, folded from all in the vectors: halves are combined with each other until two numbers are left."""
    builder, lanes, found = code.builder, code.lanes, reduce(combine, vectors)
    while lanes > 2:
        lanes //= 2
        halves = ([*range(begin, begin + lanes)] for begin in (0, lanes))
        masks = (ir.Constant(ir.VectorType(INT32, lanes), half) for half in halves)
        found = combine(*(builder.shuffle_vector(found, found, mask) for mask in masks))
    return combine(*(builder.extract_element(found, INT32(place)) for place in (0, 1)))


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
