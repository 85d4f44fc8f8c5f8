"""How the CPU's products read weights in panels, whichever type they have: as vectors of float32, input by input, or of
bfloat16, two inputs at a time.
"""

from collections.abc import Callable
from typing import Any, Protocol

from llvmlite import ir
from numba import types
from numba.core import cgutils

PANEL = 32
"""Outputs whose weights lie beside each other for each input: the cache lines of one load or two."""

INT64, INT32, FLOAT, HALF = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.HalfType()

Use = Callable[[Any, list[Any]], None]
"""Writes what is done with an input, an int64, and the vectors of weights that it meets."""

for_range: Any = cgutils.for_range


class Weights(Protocol):
    """Writes a loop over the weights of some outputs of a panel."""

    terms: Any
    """LLVM's type of what a weight is multiplied with: a float, or an int that holds two of bfloat16."""

    def each(self, weight: Any, column: Any, inputs: Any, use: Use) -> None:
        """Write `use` for each input, from the first to the last, of the panel at address `weight`."""
        ...

    def multiply_add(self, left: Any, right: Any, addend: Any) -> Any:
        """`left * right + addend` of vectors of terms, of weights, and of floats."""
        ...


class Loads:
    """Writes loads of vectors of some outputs of a panel: `vectors` of them, of `lanes` outputs each."""

    terms = FLOAT

    def __init__(self, builder: Any, lanes: int, vectors: int) -> None:
        self._builder, self.lanes, self.vectors = builder, lanes, vectors
        self.floats = ir.VectorType(FLOAT, lanes)

    def multiply_add(self, left: Any, right: Any, addend: Any) -> Any:
        """`left * right + addend` of vectors, rounded once."""
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            self._builder.module, ir.FunctionType(self.floats, [self.floats] * 3), f"llvm.fma.v{self.lanes}f32"
        )
        return self._builder.call(function, [left, right, addend])

    def _load(self, address: Any, scalar: Any, column: Any) -> list[Any]:
        """The vectors of the outputs from `column` on, of elements of LLVM's type `scalar` that begin at `address`."""
        builder = self._builder
        start = builder.gep(builder.inttoptr(address, scalar.as_pointer()), [column])
        places = [builder.gep(start, [ir.Constant(INT64, place * self.lanes)]) for place in range(self.vectors)]
        pointer = ir.VectorType(scalar, self.lanes).as_pointer()
        return [builder.load(builder.bitcast(place, pointer), align=1) for place in places]

    def _splat(self, number: int) -> Any:
        return ir.Constant(ir.VectorType(INT32, self.lanes), [number] * self.lanes)


class Dense(Loads):
    """See `Weights`. A panel is `[inputs, PANEL]`: float32, or half types as `intrinsics.widen` has them."""

    def __init__(self, dtype: Any, builder: Any, lanes: int, vectors: int) -> None:
        super().__init__(builder, lanes, vectors)
        self._bytes = dtype.bitwidth // 8
        kinds: dict[Any, tuple[Any, Callable[[Any], Any]]] = {
            types.float32: (FLOAT, lambda loaded: loaded),
            types.uint16: (ir.IntType(16), self._widen_bfloat16),
            types.int16: (HALF, lambda loaded: builder.fpext(loaded, self.floats)),
        }
        self._scalar, self._widen = kinds[dtype]

    def each(self, weight: Any, column: Any, inputs: Any, use: Use) -> None:
        """See `Weights.each`."""
        builder = self._builder
        with for_range(builder, inputs) as loop:
            line = builder.add(weight, builder.mul(loop.index, ir.Constant(INT64, PANEL * self._bytes)))
            use(loop.index, [self._widen(loaded) for loaded in self._load(line, self._scalar, column)])

    def run(self, start: Any, index: Any) -> list[Any]:
        """The vectors from number `index` on of those at address `start`, which lie side by side."""
        return [self._widen(loaded) for loaded in self._load(start, self._scalar, index)]

    def _widen_bfloat16(self, loaded: Any) -> Any:
        wide = self._builder.zext(loaded, ir.VectorType(INT32, self.lanes))
        return self._builder.bitcast(self._builder.shl(wide, self._splat(16)), self.floats)
