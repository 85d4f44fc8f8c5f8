"""How the CPU's products in bfloat16 read weights in panels: two inputs of each output at a time.

`vdpbf16ps` of AVX512_BF16 multiplies two pairs and adds both products to a float32 sum, twice as much as a multiply-add
of float32 does (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2). A processor without it makes
the same sums of float32 multiply-adds; their last bits may differ.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from app.gpu.kernels.cpu.compile import compiled_features
from app.gpu.kernels.linear.cpu.weights import FLOAT, INT32, INT64, PANEL, Loads, Use, for_range

_FIELD = "halves"
HALVES = np.dtype([(_FIELD, np.uint16, (PANEL, 2))])
"""A record of a panel: two bfloat16 of each output, of two inputs that follow each other."""
_DOT_LANES = 16
_AHEAD, _CACHE_LINE = 32768, 64
"""Bytes. Measured over the linears of a 135M Llama on AVX512_BF16, two cores: 0.75 of the time at 16 and 32 rows, 0.87
at 256. With up to four rows the processor's own prefetcher is faster, which ours disturbs."""
_TO_READ, _SECOND_LEVEL, _DATA = 0, 2, 1
"""As `llvm.prefetch` takes them."""


def is_paired(element: Any) -> bool:
    """Whether Numba's type `element` stands for weights in pairs."""
    return isinstance(element.dtype, types.Record) and _FIELD in element.dtype.fields


def multiplies_pairs() -> bool:
    """Whether kernels are compiled for a processor with an instruction for it: else they are slower than float32."""
    return "avx512bf16" in compiled_features()


class Pairs(Loads):
    """See `Weights`: a term is a pair of inputs. A panel is `[inputs / 2, PANEL, 2]` bfloat16."""

    terms = INT32

    def __init__(self, builder: Any, lanes: int, vectors: int, *, ahead: bool) -> None:
        """`ahead`: whether to prefetch weights that are used after many more products."""
        super().__init__(builder, lanes, vectors)
        self._ahead = ahead

    def each(self, weight: Any, column: Any, inputs: Any, use: Use) -> None:
        """See `Weights.each`; pairs are counted, not inputs."""
        builder = self._builder
        with for_range(builder, builder.sdiv(inputs, ir.Constant(INT64, 2))) as loop:
            line = builder.add(weight, builder.mul(loop.index, ir.Constant(INT64, PANEL * 4)))
            if self._ahead:
                prefetch_run(builder, builder.add(line, ir.Constant(INT64, _AHEAD)), PANEL * 4)
            use(loop.index, self._load(line, INT32, column))

    def multiply_add(self, left: Any, right: Any, addend: Any) -> Any:
        """See `multiply_pairs`."""
        return multiply_pairs(self._builder, left, right, addend)


def prefetch_run(builder: Any, address: Any, nbytes: int) -> None:
    """Have the second-level cache ask for the `nbytes` from `address` on."""
    byte = ir.IntType(8).as_pointer()
    kinds = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    function = _intrinsic(builder, kinds, "llvm.prefetch.p0")
    for place in range(0, nbytes, _CACHE_LINE):
        line = builder.inttoptr(builder.add(address, ir.Constant(INT64, place)), byte)
        builder.call(function, [line, INT32(_TO_READ), INT32(_SECOND_LEVEL), INT32(_DATA)])


def multiply_pairs(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    """`addend`, a vector of floats, and the products of both halves of the vectors `left` and `right`."""
    lanes = addend.type.count
    if multiplies_pairs() and lanes == _DOT_LANES:
        kind = ir.FunctionType(addend.type, [addend.type, left.type, right.type])
        return builder.call(_intrinsic(builder, kind, "llvm.x86.avx512bf16.dpbf16ps.512"), [addend, left, right])
    multiply_add = _intrinsic(builder, ir.FunctionType(addend.type, [addend.type] * 3), f"llvm.fma.v{lanes}f32")
    for half in (_first, _second):
        addend = builder.call(multiply_add, [half(builder, left), half(builder, right), addend])
    return addend


def round_to_pairs(builder: Any, first: Any, second: Any) -> Any:
    """Two vectors of floats as one of pairs, to nearest even."""
    lanes = first.type.count
    if multiplies_pairs() and lanes == _DOT_LANES:
        halves = ir.VectorType(ir.IntType(16), 2 * lanes)
        kind = ir.FunctionType(halves, [first.type] * 2)
        rounded = builder.call(_intrinsic(builder, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512"), [second, first])
        order = [place for lane in range(lanes) for place in (lane, lanes + lane)]
        mixed = builder.shuffle_vector(rounded, rounded, ir.Constant(ir.VectorType(INT32, 2 * lanes), order))
        return builder.bitcast(mixed, ir.VectorType(INT32, lanes))
    low = builder.lshr(_rounded_up(builder, first), _splat(lanes, 16))
    return builder.or_(low, builder.and_(_rounded_up(builder, second), _splat(lanes, -65536)))


def _rounded_up(builder: Any, floats: Any) -> Any:
    """The bits of floats, of which the first 16 are those of the nearest bfloat16."""
    lanes = floats.type.count
    bits = builder.bitcast(floats, ir.VectorType(INT32, lanes))
    odd = builder.and_(builder.lshr(bits, _splat(lanes, 16)), _splat(lanes, 1))
    return builder.add(bits, builder.add(odd, _splat(lanes, 0x7FFF)))


def _first(builder: Any, pairs: Any) -> Any:
    lanes = pairs.type.count
    return builder.bitcast(builder.shl(pairs, _splat(lanes, 16)), ir.VectorType(FLOAT, lanes))


def _second(builder: Any, pairs: Any) -> Any:
    lanes = pairs.type.count
    return builder.bitcast(builder.and_(pairs, _splat(lanes, -65536)), ir.VectorType(FLOAT, lanes))


def _splat(lanes: int, number: int) -> Any:
    return ir.Constant(ir.VectorType(INT32, lanes), [number] * lanes)


def _intrinsic(builder: Any, kind: Any, name: str) -> Any:
    return cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
