"""The innermost loop of the CPU's products as an intrinsic of Numba's functions: a tile of sums that stay in registers.

Numba has no vectors. What LLVM makes of scalar loops keeps one sum in many parts, which depend on how it unrolls.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

PANEL = 32
"""Outputs whose weights lie beside each other for each input: the cache lines of one load or two."""

_INT64, _INT32, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()


def _shape_of_tiles() -> tuple[int, int, int]:
    """Rows of a tile, vectors of a row, lanes of a vector: as many sums as there are registers for."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 12, 2, 16
    return (6, 2, 8) if features.get("avx2") else (6, 2, 4)


ROWS, _VECTORS, _LANES = _shape_of_tiles()
COLUMNS = _VECTORS * _LANES
"""Outputs of a tile; they divide a panel."""


def make_tile(rows: int) -> Any:
    """`tile(x, x_bytes, weight, inputs, out, out_bytes)`, an intrinsic for `rows` rows.

    Addresses are those of `x` `[rows, inputs]`, of a panel from the tile's first column on, and of `out`
    `[rows, COLUMNS]`, all float32; rows of `x` and `out` are `x_bytes` and `out_bytes` apart. `inputs` is at least 1.
    Each sum begins with zero and is made with fused multiply-adds from its first term to its last: its bits are those
    of any other tile.
    """

    def tile(typing: Any, x: Any, x_bytes: Any, weight: Any, inputs: Any, out: Any, out_bytes: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _generate(builder, rows, *arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return intrinsic(tile)


def _generate(
    builder: Any, rows: int, x: Any, x_bytes: Any, weight: Any, inputs: Any, out: Any, out_bytes: Any
) -> None:
    vector = ir.VectorType(_FLOAT, _LANES)
    multiply_add = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{_LANES}f32"
    )
    lines = [_address(builder, x, x_bytes, row) for row in range(rows)]
    before, loop = builder.block, builder.append_basic_block("terms")
    builder.branch(loop)
    builder.position_at_end(loop)
    term = builder.phi(_INT64)
    term.add_incoming(ir.Constant(_INT64, 0), before)
    sums = [[builder.phi(vector) for _ in range(_VECTORS)] for _ in range(rows)]
    loaded = _load_weights(builder, vector, weight, term)
    for line, row in zip(lines, sums, strict=True):
        value = _spread(builder, vector, builder.load(builder.gep(line, [term])))
        for weights, total in zip(loaded, row, strict=True):
            total.add_incoming(ir.Constant(vector, [0.0] * _LANES), before)
            total.add_incoming(builder.call(multiply_add, [value, weights, total]), loop)
    following = builder.add(term, ir.Constant(_INT64, 1))
    term.add_incoming(following, loop)
    after = builder.append_basic_block("stored")
    builder.cbranch(builder.icmp_signed("<", following, inputs), loop, after)
    builder.position_at_end(after)
    for number, row in enumerate(sums):
        line = _address(builder, out, out_bytes, number)
        for place, total in enumerate(row):
            target = builder.gep(line, [ir.Constant(_INT64, place * _LANES)])
            builder.store(total.incomings[1][0], builder.bitcast(target, vector.as_pointer()), align=4)


def _address(builder: Any, start: Any, stride: Any, row: int) -> Any:
    """Where the row begins, as a pointer to floats."""
    offset = builder.mul(stride, ir.Constant(_INT64, row))
    return builder.inttoptr(builder.add(start, offset), _FLOAT.as_pointer())


def _load_weights(builder: Any, vector: Any, weight: Any, term: Any) -> list[Any]:
    """The vectors of weights that one input meets."""
    first = builder.mul(term, ir.Constant(_INT64, PANEL))
    start = builder.gep(builder.inttoptr(weight, _FLOAT.as_pointer()), [first])
    places = [builder.gep(start, [ir.Constant(_INT64, place * _LANES)]) for place in range(_VECTORS)]
    return [builder.load(builder.bitcast(place, vector.as_pointer()), align=4) for place in places]


def _spread(builder: Any, vector: Any, value: Any) -> Any:
    """A vector of which every lane is `value`."""
    empty = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(_INT32, _LANES), [0] * _LANES))
