"""Products of bfloat16 by Intel's AMX, of which one instruction multiplies 16 rows, 32 inputs and 16 outputs.

`TDPBF16PS` (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2) takes `inputs` in runs of 32. Of a
run it makes two sums of fused multiply-adds, of the even inputs and of the odd ones, from first to last; it adds one to
the other, and that to the row's sum. So a row's bits depend neither on the rows beside it nor on where a product is
cut, if that is between runs. They are not those of `tiles`: on a processor that has AMX all products come here.

Linux gives the registers to a process that has asked for them (`arch_prctl`); `compile` does.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from app.gpu.kernels.cpu.compile import compiled_features, inlined
from app.gpu.kernels.cpu.intrinsics import INT64, Lanes, instruction
from app.gpu.kernels.cpu.tiles import PANEL, multiplies_pairs

DEPTH = 32
"""Inputs of a run: a row of a register has 64 bytes."""
ROWS = 16
"""Of a register at most."""
COLUMNS = 16
"""Outputs of one."""
_PALETTE = 1
"""The only one: eight registers of 1 KiB."""
_SUMS, _INPUTS, _WEIGHTS = 0, 4, 6
"""The first register of each kind: four of sums, two of inputs, two of weights."""
AMD = "znver"
"""How LLVM's names of AMD's processors begin."""
_INT8, _INT16 = ir.IntType(8), ir.IntType(16)


def multiplies_in_registers() -> bool:
    """Whether kernels are compiled for a processor with AMX for bfloat16, and the system lets this process use it."""
    return {"amx-tile", "amx-bf16"} <= compiled_features()


def bfloat16_is_fast() -> bool:
    """Whether products of bfloat16 take less time than those of float32. With AMD's `vdpbf16ps` they take half of it.
    With Intel's they take longer. Measured with weights of `[576, 1536]`, 512 rows and a core of an Emerald Rapids,
    10^9 products a second: 65 in float32, 41 with `vdpbf16ps`, 395 with AMX.
    """
    return multiplies_in_registers() or (multiplies_pairs() and llvm.get_host_cpu_name().startswith(AMD))


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _INT8.as_pointer())


def _call(builder: Any, name: str, *values: Any) -> None:
    """An instruction of AMX, where kernels are compiled for it; ints are numbers of registers."""
    if not multiplies_in_registers():  # LLVM has none, not even for code that is never reached
        return
    numbers = [_INT8(each) if isinstance(each, int) else each for each in values]
    Lanes(builder).call(f"llvm.x86.{name}", ir.VoidType(), *numbers)


@instruction(types.void(types.int64, types.int64))
def configure(builder: Any, rows: Any, depth: Any) -> None:
    """`configure(rows, depth)`: give this thread's registers the shapes for blocks of up to 32 rows, and for runs of
    `depth` inputs: an even number, at most `DEPTH`.
    """
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(_INT8, 64))
    memory.align = 64
    start = builder.ptrtoint(memory, INT64)
    for word in range(8):
        at = builder.inttoptr(builder.add(start, INT64(8 * word)), INT64.as_pointer())
        builder.store(INT64(_PALETTE if word == 0 else 0), at)
    is_one = builder.icmp_signed("<=", rows, INT64(ROWS))
    first = builder.select(is_one, rows, INT64(ROWS))
    second = builder.select(is_one, INT64(ROWS), builder.sub(rows, INT64(ROWS)))
    line = INT64(COLUMNS * 4)
    inputs, pairs = builder.mul(depth, INT64(2)), builder.sdiv(depth, INT64(2))
    shapes = [(first, line)] * 2 + [(second, line)] * 2 + [(first, inputs), (second, inputs)] + [(pairs, line)] * 2
    for number, (height, nbytes) in enumerate(shapes):
        for kind, value, place in ((_INT16, nbytes, 16 + 2 * number), (_INT8, height, 48 + number)):
            at = builder.inttoptr(builder.add(start, INT64(place)), kind.as_pointer())
            builder.store(builder.trunc(value, kind), at)
    _call(builder, "ldtilecfg", _pointer(builder, start))


@instruction(types.void())
def release(builder: Any) -> None:
    """`release()` the registers: a thread whose registers are in use takes longer to switch."""
    _call(builder, "tilerelease")


def make_block(parts: int, outputs: int) -> Any:
    """`block(x, x_bytes, weight, runs, out, out_bytes, carry)`: `outputs` of a panel of the type `HALVES`, the first
    ones, for the rows of `parts` registers, one or two, which were given their shapes. The rest is as in `make_tile`.
    """

    @instruction(types.void(*[types.int64] * 7))
    def block(builder: Any, x: Any, x_bytes: Any, weight: Any, runs: Any, out: Any, out_bytes: Any, carry: Any) -> None:
        def below(start: Any, part: int, line: Any) -> Any:
            return builder.add(start, builder.mul(line, INT64(part * ROWS)))

        columns = range(outputs // COLUMNS)
        sums = {
            _SUMS + 2 * part + column: _pointer(
                builder, builder.add(below(out, part, out_bytes), INT64(column * COLUMNS * 4))
            )
            for part in range(parts)
            for column in columns
        }
        with builder.if_else(builder.icmp_signed("!=", carry, INT64(0))) as (then, otherwise):
            with then:
                for number, place in sums.items():
                    _call(builder, "tileloadd64", number, place, out_bytes)
            with otherwise:
                for number in sums:
                    _call(builder, "tilezero", number)
        with cgutils.for_range(builder, runs) as loop:
            at = builder.add(x, builder.mul(loop.index, INT64(DEPTH * 2)))
            for part in range(parts):
                _call(builder, "tileloadd64", _INPUTS + part, _pointer(builder, below(at, part, x_bytes)), x_bytes)
            line = builder.add(weight, builder.mul(loop.index, INT64(DEPTH * PANEL * 2)))
            for column in columns:
                place = _pointer(builder, builder.add(line, INT64(column * COLUMNS * 4)))
                _call(builder, "tileloadd64", _WEIGHTS + column, place, INT64(PANEL * 4))
                for part in range(parts):
                    _call(builder, "tdpbf16ps", _SUMS + 2 * part + column, _INPUTS + part, _WEIGHTS + column)
        for number, place in sums.items():
            _call(builder, "tilestored64", number, place, out_bytes)

    return block


_one, _both = (make_block(parts, PANEL) for parts in (1, 2))


@inlined
def multiply_in_registers(
    element: Any, rows: Any, x: Any, x_bytes: Any, weight: Any, inputs: Any, out: Any, out_bytes: Any, carry: Any
) -> None:
    """All outputs of a panel of the type `HALVES`, with arguments as in `tiles.make_tile`; `x` is dense. `inputs` is a
    multiple of `DEPTH` where more of them follow.
    """
    done: Any = 0
    while done < inputs:
        depth = min(DEPTH, inputs - done)
        runs = (inputs - done) // depth
        first, shaped = 0, 0
        while first < rows:
            count = min(2 * ROWS, rows - first)
            shape = 2 * ROWS if count == ROWS else count
            if shape != shaped:
                configure(shape, depth)
                shaped = shape
            at, to, line = x + first * x_bytes + done * 2, out + first * out_bytes, weight + done * PANEL * 2
            if count > ROWS:
                _both(at, x_bytes, line, runs, to, out_bytes, carry + done)
            else:
                _one(at, x_bytes, line, runs, to, out_bytes, carry + done)
            first += count
        done += runs * depth
    release()
