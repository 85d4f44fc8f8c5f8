"""How the CPU's products in bfloat16 read weights in panels: two inputs of each output at a time.

`vdpbf16ps` of AVX512_BF16 multiplies two pairs and adds both products to a float32 sum, twice as much as a multiply-add
of float32 does (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2). A processor without it makes
the same sums of float32 multiply-adds; their last bits may differ.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from app.gpu.cpu.compile import compiled_features
from app.gpu.linear.cpu_weights import INT32, INT64, PANEL, Loads, Use, for_range

FIELD = "halves"
"""Of a panel's record: two bfloat16 of each output, of two inputs that follow each other."""
_DOT_LANES = 16
_AHEAD, _CACHE_LINE = 32768, 64
"""Bytes. Measured over the linears of a 135M Llama on AVX512_BF16, two cores: 0.75 of the time at 16 and 32 rows, 0.87
at 256. With up to four rows the processor's own prefetcher is faster, which ours disturbs."""
_TO_READ, _SECOND_LEVEL, _DATA = 0, 2, 1
"""As `llvm.prefetch` takes them."""


def is_paired(element: Any) -> bool:
    """Whether Numba's type `element` stands for weights in pairs."""
    return isinstance(element.dtype, types.Record) and FIELD in element.dtype.fields


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
                self._prefetch(line)
            use(loop.index, self._load(line, INT32, column))

    def _prefetch(self, line: Any) -> None:
        """Have the cache ask for what follows `AHEAD` bytes later: most of it is of the next panel."""
        builder = self._builder
        byte = ir.IntType(8).as_pointer()
        kinds = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
        function = cgutils.get_or_insert_function(builder.module, kinds, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
        for place in range(0, PANEL * 4, _CACHE_LINE):
            address = builder.inttoptr(builder.add(line, ir.Constant(INT64, _AHEAD + place)), byte)
            builder.call(function, [address, INT32(_TO_READ), INT32(_SECOND_LEVEL), INT32(_DATA)])

    def multiply_add(self, left: Any, right: Any, addend: Any) -> Any:
        """`addend` and the products of both halves of `left` and `right`."""
        if multiplies_pairs() and self.lanes == _DOT_LANES:
            pairs = ir.VectorType(INT32, self.lanes)
            function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
                self._builder.module,
                ir.FunctionType(self.floats, [self.floats, pairs, pairs]),
                "llvm.x86.avx512bf16.dpbf16ps.512",
            )
            return self._builder.call(function, [addend, left, right])
        for half in (self._first, self._second):
            addend = super().multiply_add(half(left), half(right), addend)
        return addend

    def _first(self, pairs: Any) -> Any:
        return self._builder.bitcast(self._builder.shl(pairs, self._splat(16)), self.floats)

    def _second(self, pairs: Any) -> Any:
        return self._builder.bitcast(self._builder.and_(pairs, self._splat(-65536)), self.floats)
