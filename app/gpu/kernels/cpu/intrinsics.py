"""What Numba has no functions for, written in LLVM's instructions: atomics, addresses, numbers of small types."""

import inspect
import platform
from collections.abc import Callable
from functools import reduce
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

INT64, INT32, FLOAT, HALF = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.HalfType()
_INT16, _INT8 = ir.IntType(16), ir.IntType(8)
LEAST_EXPONENT = np.float32(-126)
"""Of the least normal float32."""
LOG2_E = np.float32(1.4426950408889634)
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
_TO_READ, _SECOND_LEVEL, _DATA = 0, 2, 1
"""As `llvm.prefetch` takes them."""
CACHE_LINE = 64


def instruction(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function of Numba's of one that writes its code: it gets llvmlite's builder and the values of its
    arguments, and returns that of the result, or None. `signature` is Numba's; or it makes one of the arguments' types,
    which are then given in a tuple after the builder.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        is_generic = not isinstance(signature, Signature)

        def typed(typing: Any, *kinds: Any) -> Any:
            def generate(context: Any, builder: Any, signed: Any, values: Any) -> Any:
                made = write(builder, kinds, *values) if is_generic else write(builder, *values)
                return context.get_dummy_value() if made is None else made

            return signature(*kinds) if is_generic else signature, generate

        names = list(inspect.signature(write).parameters)[2 if is_generic else 1 :]
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, positional) for name in ("typing", *names)]
        cast("Any", typed).__signature__ = inspect.Signature(parameters)
        typed.__name__, typed.__doc__ = write.__name__, write.__doc__
        return intrinsic(typed)

    return decorate


class Lanes:
    """Writes code for `lanes` float32 at a time, in a vector; or for one number, if that is 1."""

    def __init__(self, builder: Any, lanes: int = 1) -> None:
        self.builder, self.lanes = builder, lanes
        self.floats, self.integers = self.of(FLOAT), self.of(INT32)

    def of(self, scalar: Any) -> Any:
        """The type of as many numbers of LLVM's type `scalar`."""
        return scalar if self.lanes == 1 else ir.VectorType(scalar, self.lanes)

    def constant(self, kind: Any, number: Any) -> Any:
        """`number` in each lane of the type `kind`."""
        return ir.Constant(kind, number if self.lanes == 1 else [number] * self.lanes)

    def call(self, name: str, result: Any, *values: Any) -> Any:
        """What LLVM's own function `name` makes of values."""
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, name),  # type: ignore[no-untyped-call]
            values,
        )

    def place(self, start: Any, scalar: Any, index: Any, offset: int = 0) -> Any:
        """Of the numbers from `index + offset` on, among those of LLVM's type `scalar` at address `start`."""
        at = self.builder.gep(self.builder.inttoptr(start, scalar.as_pointer()), [index])
        at = self.builder.gep(at, [INT64(offset)]) if offset else at
        return self.builder.bitcast(at, self.of(scalar).as_pointer())

    def load(self, start: Any, scalar: Any, index: Any, offset: int = 0) -> Any:
        """The numbers there."""
        return self.builder.load(self.place(start, scalar, index, offset), align=1)

    def store(self, numbers: Any, start: Any, scalar: Any, index: Any, offset: int = 0) -> None:
        """Put numbers, of any type of four bytes, there."""
        place = self.place(start, scalar, index, offset)
        self.builder.store(self.builder.bitcast(numbers, place.type.pointee), place, align=4)

    def spread(self, value: Any) -> Any:
        """`value` in each lane."""
        if self.lanes == 1:
            return value
        empty = ir.Constant(self.of(value.type), ir.Undefined)
        first = self.builder.insert_element(empty, value, INT32(0))
        return self.builder.shuffle_vector(first, empty, self.constant(self.integers, 0))

    def multiply_add(self, left: Any, right: Any, addend: Any) -> Any:
        """`left * right + addend`, rounded once."""
        suffix = "f32" if self.lanes == 1 else f"v{self.lanes}f32"
        return self.call(f"llvm.fma.{suffix}", self.floats, left, right, addend)

    def maximum(self, left: Any, right: Any) -> Any:
        """The larger number of each lane."""
        return self.builder.select(self.builder.fcmp_ordered(">", left, right), left, right)

    def exp2(self, x: Any) -> Any:
        """2 to the `x`, for `-126 <= x <= 127`, to about 2e-7."""
        builder = self.builder
        whole = self.call("llvm.rint." + ("f32" if self.lanes == 1 else f"v{self.lanes}f32"), self.floats, x)
        part = builder.fsub(x, whole)
        first, *others = (self.constant(self.floats, each) for each in _EXP2)
        y = reduce(lambda y, coefficient: self.multiply_add(y, part, coefficient), others, first)
        exponent = builder.add(builder.fptosi(whole, self.integers), self.constant(self.integers, 127))
        return builder.fmul(y, builder.bitcast(builder.shl(exponent, self.constant(self.integers, 23)), self.floats))

    def widen(self, kind: Any, numbers: Any) -> Any:
        """Numbers of Numba's type `kind`, see `widen`, as float32."""
        builder = self.builder
        if kind == types.uint16:
            wide = builder.zext(numbers, self.integers)
            return builder.bitcast(builder.shl(wide, self.constant(self.integers, 16)), self.floats)
        if kind == types.int16:
            return builder.fpext(builder.bitcast(numbers, self.of(HALF)), self.floats)
        if kind == types.uint8:  # as float16 the same bits stand for the number over 256
            bits = self.of(_INT16)
            wide = builder.zext(numbers, bits)
            sign = builder.shl(builder.and_(wide, self.constant(bits, 0x80)), self.constant(bits, 8))
            size = builder.shl(builder.and_(wide, self.constant(bits, 0x7F)), self.constant(bits, 7))
            halves = builder.bitcast(builder.or_(sign, size), self.of(HALF))
            return builder.fmul(builder.fpext(halves, self.floats), self.constant(self.floats, 256.0))
        return numbers

    def rounded_up(self, numbers: Any) -> Any:
        """The bits of float32 numbers, of which the first 16 are those of the nearest bfloat16."""
        builder = self.builder
        bits = builder.bitcast(numbers, self.integers)
        odd = builder.and_(builder.lshr(bits, self.constant(self.integers, 16)), self.constant(self.integers, 1))
        return builder.add(bits, builder.add(odd, self.constant(self.integers, 0x7FFF)))


def prefetch_line(builder: Any, pointer: Any) -> None:
    """Ask for the cache line there, for reading, into the second-level cache."""
    line = builder.bitcast(pointer, _INT8.as_pointer())
    hints = (INT32(_TO_READ), INT32(_SECOND_LEVEL), INT32(_DATA))
    Lanes(builder).call("llvm.prefetch.p0", ir.VoidType(), line, *hints)


def _counter(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, INT64.as_pointer())


@instruction(types.voidptr(types.int64))
def pointer(builder: Any, address: Any) -> Any:
    """`pointer(address)`: an int64 as the pointer that `carray` takes."""
    return builder.inttoptr(address, _INT8.as_pointer())


@instruction(lambda record: types.int64(record))
def address_of(builder: Any, kinds: Any, record: Any) -> Any:
    """`address_of(record)`: where in memory it is."""
    return builder.ptrtoint(record, INT64)


@instruction(types.int64(types.int64, types.int64))
def fetch_add(builder: Any, address: Any, number: Any) -> Any:
    """`fetch_add(address, number)`: add to the int64 there; returns what it was. Orders memory as a mutex would."""
    return builder.atomic_rmw("add", _counter(builder, address), number, "acq_rel")


@instruction(types.int64(types.int64))
def load(builder: Any, address: Any) -> Any:
    """`load(address)`: the int64 there, as other threads have left it; what they wrote before is seen after it."""
    return builder.load_atomic(_counter(builder, address), "acquire", 8)


@instruction(types.void(types.int64, types.int64))
def store(builder: Any, address: Any, value: Any) -> None:
    """`store(address, value)`: an int64 for other threads; with it they see what was written before."""
    builder.store_atomic(value, _counter(builder, address), "release", 8)


@instruction(types.void(types.int64, types.int64))
def call(builder: Any, function: Any, argument: Any) -> None:
    """`call(function, argument)`: call the C function `void f(void *)` at that address."""
    kind = ir.FunctionType(ir.VoidType(), [INT64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [argument])


@instruction(types.void())
def relax(builder: Any) -> None:
    """`relax()`: tell an x86 core that it spins, which saves power and leaves more to its other thread."""
    if platform.machine() in ("x86_64", "AMD64"):
        Lanes(builder).call("llvm.x86.sse2.pause", ir.VoidType())


@instruction(lambda array, index: types.void(array, index))
def prefetch(builder: Any, kinds: Any, array: Any, index: Any) -> None:
    """`prefetch(array, index)`: ask for the cache line of that element, for reading, into the second-level cache."""
    prefetch_line(builder, _element(builder, array, index))


@instruction(types.float32(types.float32))
def exp2(builder: Any, x: Any) -> Any:
    """`exp2(x)`: 2 to the `x`, for `-126 <= x <= 127`, to about 2e-7."""
    return Lanes(builder).exp2(x)


@instruction(lambda element: types.float32(element))
def widen(builder: Any, kinds: Any, element: Any) -> Any:
    """`widen(element)`: float32 of float32, bfloat16 as uint16, float16 as int16, or float8, unscaled, as uint8."""
    return Lanes(builder).widen(kinds[0], element)


@instruction(lambda element, like: like(_narrowest(element), like))
def convert(builder: Any, kinds: Any, element: Any, like: Any) -> Any:
    """`convert(element, like)`: an element as of the kind of `like` (see `widen`), rounded to even; NaN stays."""
    lanes, kind, wanted = Lanes(builder), _narrowest(kinds[0]), kinds[1]
    if kind == wanted:
        return element
    number = lanes.widen(kind, element)
    if wanted == types.int16:
        return builder.bitcast(builder.fptrunc(number, HALF), _INT16)
    if wanted == types.float32:
        return number
    bits, shift = builder.bitcast(number, INT32), INT32(16)
    kept = builder.or_(builder.lshr(bits, shift), INT32(0x40))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, INT32(0x7FFFFFFF)), INT32(0x7F800000))
    rounded = builder.lshr(lanes.rounded_up(number), shift)
    return builder.trunc(builder.select(is_nan, kept, rounded), _INT16)


def _narrowest(kind: Any) -> Any:
    """What Numba's type `kind` is cast to before it is converted."""
    return types.float32 if isinstance(kind, types.Float) else kind


@instruction(lambda array, index: types.float32(array, index))
def scale_of(builder: Any, kinds: Any, array: Any, index: Any) -> Any:
    """`scale_of(array, index)`: the float32 scale that begins at that element of an array of float8; else 1."""
    if kinds[0].dtype != types.uint8:
        return FLOAT(1.0)
    return builder.load(builder.bitcast(_element(builder, array, index), FLOAT.as_pointer()), align=1)


def _element(builder: Any, array: Any, index: Any) -> Any:
    """Where that element of one of Numba's arrays is."""
    data = builder.extract_value(array, 4)  # after two owners, the number of items and their size
    return builder.gep(data, [index])
