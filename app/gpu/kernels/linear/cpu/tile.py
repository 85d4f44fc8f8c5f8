"""The innermost loops of the CPU's products as intrinsics of Numba's functions: a tile of sums that stay in registers.

Numba has no vectors. What LLVM makes of scalar loops keeps one sum in many parts, which depend on how it unrolls.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from app.gpu.kernels.cpu.compile import compiled_features
from app.gpu.kernels.linear.cpu.blocks import weights_of
from app.gpu.kernels.linear.cpu.pairs import is_paired
from app.gpu.kernels.linear.cpu.weights import INT64, PANEL, Weights

_INT32, _FLOAT = ir.IntType(32), ir.FloatType()


def _shape_of_tiles() -> tuple[int, int, int]:
    """Rows of a tile, vectors of a row, lanes of a vector: as many sums as there are registers for."""
    features = compiled_features()
    if "avx512f" in features:
        return 12, 2, 16
    return (6, 2, 8) if "avx2" in features else (6, 2, 4)


ROWS, _VECTORS, LANES = _shape_of_tiles()
COLUMNS = _VECTORS * LANES
"""Outputs of a tile; they divide a panel."""


def make_tile(rows: int, columns: int, *, ahead: bool = False) -> Any:
    """`tile(element, x, x_bytes, weight, column, inputs, out, out_bytes, carry)`, an intrinsic for `rows` rows and
    `columns` outputs of a panel, from `column` on.

    Addresses are those of `x` `[rows, inputs]`, of a panel of weights of the type `element`, and of `out`
    `[rows, columns]`; rows of `x` and `out` are `x_bytes` and `out_bytes` apart. `x` is bfloat16 for weights in pairs,
    all else float32. Each sum begins with zero if `carry` is 0, else with the number in `out`, and is made with fused
    multiply-adds from its first term to its last: its bits are those of any other tile, and of any type of weights with
    the same values that is not in pairs. `ahead`: whether weights are prefetched where that pays, see `Pairs`.
    """

    def tile(
        typing: Any,
        element: Any,
        x: Any,
        x_bytes: Any,
        weight: Any,
        column: Any,
        inputs: Any,
        out: Any,
        out_bytes: Any,
        carry: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights = weights_of(element, builder, LANES, columns // LANES, ahead=ahead)
            _Tile(builder, rows, columns // LANES, weights).generate(*arguments[1:])
            return context.get_dummy_value()

        return types.void(element, *[types.int64] * 8), generate

    return intrinsic(tile)


def make_column_tile(rows: int, columns: int) -> Any:
    """`tile(element, step, x, ...)`: as `make_tile`, of an `x` whose terms are `step` floats apart."""

    def tile(
        typing: Any,
        element: Any,
        step: Any,
        x: Any,
        x_bytes: Any,
        weight: Any,
        column: Any,
        inputs: Any,
        out: Any,
        out_bytes: Any,
        carry: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights = weights_of(element, builder, LANES, columns // LANES)
            _Tile(builder, rows, columns // LANES, weights, arguments[1]).generate(*arguments[2:])
            return context.get_dummy_value()

        return types.void(element, *[types.int64] * 9), generate

    return intrinsic(tile)


class _Tile:
    """Writes one tile; `step` says how many floats terms of `x` are apart, None: they lie side by side."""

    def __init__(self, builder: Any, rows: int, vectors: int, weights: Weights, step: Any = None) -> None:
        self._builder, self._rows, self._weights, self._step = builder, rows, weights, step
        self._vector = ir.VectorType(_FLOAT, LANES)
        self._vectors = vectors
        with builder.goto_entry_block():
            self._sums = [builder.alloca(self._vector) for _ in range(rows * vectors)]

    def generate(
        self, x: Any, x_bytes: Any, weight: Any, column: Any, inputs: Any, out: Any, out_bytes: Any, carry: Any
    ) -> None:
        lines = [self._address(x, x_bytes, row, self._weights.terms) for row in range(self._rows)]
        places = self._places(out, out_bytes)
        self._begin(places, carry)
        self._weights.each(weight, column, inputs, lambda term, loaded: self._add(lines, term, loaded))
        for place, total in zip(places, self._sums, strict=True):
            self._builder.store(self._builder.load(total), place, align=4)

    def _begin(self, places: list[Any], carry: Any) -> None:
        builder = self._builder
        zero = ir.Constant(self._vector, [0.0] * LANES)
        for total in self._sums:
            builder.store(zero, total)
        with builder.if_then(builder.icmp_signed("!=", carry, ir.Constant(INT64, 0))):
            for place, total in zip(places, self._sums, strict=True):
                builder.store(builder.load(place, align=4), total)

    def _add(self, lines: list[Any], term: Any, loaded: list[Any]) -> None:
        """To every sum the product of its row's input `term` and its weight."""
        builder = self._builder
        place = term if self._step is None else builder.mul(term, self._step)
        for row, line in enumerate(lines):
            value = _spread(builder, LANES, builder.load(builder.gep(line, [place])))
            sums = self._sums[row * self._vectors : (row + 1) * self._vectors]
            for weights, total in zip(loaded, sums, strict=True):
                builder.store(self._weights.multiply_add(value, weights, builder.load(total)), total)

    def _places(self, out: Any, out_bytes: Any) -> list[Any]:
        """Of the sums' vectors in `out`, row by row."""
        return [
            self._builder.bitcast(
                self._builder.gep(self._address(out, out_bytes, row, _FLOAT), [ir.Constant(INT64, place * LANES)]),
                self._vector.as_pointer(),
            )
            for row in range(self._rows)
            for place in range(self._vectors)
        ]

    def _address(self, start: Any, stride: Any, row: int, scalar: Any) -> Any:
        """Where the row begins, as a pointer to elements of LLVM's type `scalar`."""
        offset = self._builder.mul(stride, ir.Constant(INT64, row))
        return self._builder.inttoptr(self._builder.add(start, offset), scalar.as_pointer())


def _spread(builder: Any, lanes: int, value: Any) -> Any:
    """A vector of which every lane is `value`."""
    empty = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes))


def _unpack(typing: Any, element: Any, weight: Any, inputs: Any, out: Any) -> Any:
    """`unpack(element, weight, inputs, out)`: the address at which the panel at `weight` is float32 `[inputs, PANEL]`,
    or pairs of bfloat16 for weights that are multiplied so: its own, or else `out`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if element.dtype == types.float32 or is_paired(element):
            return arguments[1]
        panel, count, target = arguments[1:]
        weights = weights_of(element, builder, LANES, PANEL // LANES, ahead=True)
        start = builder.inttoptr(target, weights.terms.as_pointer())

        def store(term: Any, loaded: list[Any]) -> None:
            line = builder.gep(start, [builder.mul(term, ir.Constant(INT64, PANEL))])
            for place, values in enumerate(loaded):
                at = builder.gep(line, [ir.Constant(INT64, place * LANES)])
                builder.store(values, builder.bitcast(at, values.type.as_pointer()), align=4)

        weights.each(panel, ir.Constant(INT64, 0), count, store)
        return target

    return types.int64(element, *[types.int64] * 3), generate


def make_scratch(nbytes: int) -> Any:
    """`scratch()`: the address of `nbytes` bytes on the stack of the function that asks."""

    def scratch(typing: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            with builder.goto_entry_block():
                memory = builder.alloca(ir.ArrayType(ir.IntType(8), nbytes))
            memory.align = 64
            return builder.ptrtoint(memory, INT64)

        return types.int64(), generate

    return intrinsic(scratch)


unpack: Any = intrinsic(_unpack)
