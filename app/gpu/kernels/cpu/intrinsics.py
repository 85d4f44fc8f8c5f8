"""Machine instructions that Numba has no function for, as intrinsics of its compiled functions."""

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INT64, _INT32, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()


def _pointer(typing: Any, address: Any) -> Any:
    """`pointer(address)`: an int64 as the pointer that `carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


def _fetch_add(typing: Any, address: Any) -> Any:
    """`fetch_add(address)`: add one to the int64 there; returns what it was. Orders memory as a mutex would."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(_INT64, 1), "acq_rel")

    return types.int64(types.int64), generate


def _fetch_subtract(typing: Any, address: Any) -> Any:
    """`fetch_subtract(address)`: take one from the int64 there, as `fetch_add` adds one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.atomic_rmw("sub", pointer, ir.Constant(_INT64, 1), "acq_rel")

    return types.int64(types.int64), generate


def _load(typing: Any, address: Any) -> Any:
    """`load(address)`: the int64 there, as other threads have left it; what they wrote before is seen after it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _INT64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


def _store(typing: Any, address: Any, value: Any) -> Any:
    """`store(address, value)`: an int64 for other threads; with it they see what was written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], _INT64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _call(typing: Any, function: Any, argument: Any) -> Any:
    """`call(function, argument)`: call the C function `void f(void *)` at that address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [_INT64])
        builder.call(builder.inttoptr(arguments[0], function_type.as_pointer()), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _relax(typing: Any) -> Any:
    """`relax()`: tell an x86 core that it spins, which saves power and leaves more to its other thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            pause = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            builder.call(pause, [])
        return context.get_dummy_value()

    return types.void(), generate


def _prefetch(typing: Any, array: Any, index: Any) -> Any:
    """`prefetch(array, index)`: ask for the cache line of that element, for reading, into the second-level cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        byte = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
        name = "llvm.prefetch.p0"
        function = cgutils.get_or_insert_function(builder.module, function_type, name)  # type: ignore[no-untyped-call]
        line = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(function, [line, _INT32(0), _INT32(2), _INT32(1)])  # read, level 2, data
        return context.get_dummy_value()

    return types.void(array, index), generate


def _widen(typing: Any, element: Any) -> Any:
    """`widen(element)`: float32 of a float32, of a bfloat16 as uint16, of a float16 as int16, or of a float8 as uint8,
    without its scale.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _widened(builder, element, arguments[0])

    return types.float32(element), generate


def _widened(builder: Any, element: Any, value: Any) -> Any:
    if element == types.uint16:
        bits = builder.shl(builder.zext(value, _INT32), ir.Constant(_INT32, 16))
        return builder.bitcast(bits, _FLOAT)
    if element == types.int16:
        return builder.fpext(builder.bitcast(value, ir.HalfType()), _FLOAT)
    if element == types.uint8:
        return widened_float8(builder, value, lambda kind: kind)
    return value


def widened_float8(builder: Any, codes: Any, shaped: Callable[[Any], Any]) -> Any:
    """Float32 of codes of float8 E4M3: as float16 the same bits stand for the number over 256. `shaped` makes the type
    of one the type of as many as there are.
    """
    bits = shaped(ir.IntType(16))

    def constant(kind: Any, number: Any) -> Any:
        return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)

    wide = builder.zext(codes, bits)
    sign = builder.shl(builder.and_(wide, constant(bits, 0x80)), constant(bits, 8))
    size = builder.shl(builder.and_(wide, constant(bits, 0x7F)), constant(bits, 7))
    halves = builder.bitcast(builder.or_(sign, size), shaped(ir.HalfType()))
    floats = shaped(_FLOAT)
    return builder.fmul(builder.fpext(halves, floats), constant(floats, 256.0))


def _scale_of(typing: Any, array: Any, index: Any) -> Any:
    """`scale_of(array, index)`: the scale, float32, that begins at that element of an array of float8; 1 in any other
    array.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if array.dtype != types.uint8:
            return ir.Constant(_FLOAT, 1.0)
        data = context.make_array(array)(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), _FLOAT.as_pointer())
        return builder.load(place, align=1)

    return types.float32(array, index), generate


def _narrow(typing: Any, value: Any, like: Any) -> Any:
    """`narrow(value, like)`: a float32 as an element of the kind of `like` (see `widen`), to nearest even; NaN
    stays.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _narrowed(builder, like, arguments[0])

    return like(types.float32, like), generate


def _narrowed(builder: Any, like: Any, number: Any) -> Any:
    if like == types.uint16:
        bits = builder.bitcast(number, _INT32)
        shift = ir.Constant(_INT32, 16)
        odd = builder.and_(builder.lshr(bits, shift), ir.Constant(_INT32, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(_INT32, 0x7FFF))), shift)
        kept = builder.or_(builder.lshr(bits, shift), ir.Constant(_INT32, 0x40))
        is_nan = builder.icmp_unsigned(
            ">", builder.and_(bits, ir.Constant(_INT32, 0x7FFFFFFF)), ir.Constant(_INT32, 0x7F800000)
        )
        return builder.trunc(builder.select(is_nan, kept, rounded), ir.IntType(16))
    if like == types.int16:
        return builder.bitcast(builder.fptrunc(number, ir.HalfType()), ir.IntType(16))
    return number


def _convert(typing: Any, value: Any, like: Any) -> Any:
    """`convert(value, like)`: an element as one of the kind of `like` (see `widen`), to nearest even. One of the same
    kind keeps its bits.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if value == like:
            return arguments[0]
        return _narrowed(builder, like, _widened(builder, value, arguments[0]))

    return like(value, like), generate


pointer: Any = intrinsic(_pointer)
fetch_add: Any = intrinsic(_fetch_add)
fetch_subtract: Any = intrinsic(_fetch_subtract)
load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
call: Any = intrinsic(_call)
relax: Any = intrinsic(_relax)
prefetch: Any = intrinsic(_prefetch)
widen: Any = intrinsic(_widen)
scale_of: Any = intrinsic(_scale_of)
narrow: Any = intrinsic(_narrow)
convert: Any = intrinsic(_convert)
