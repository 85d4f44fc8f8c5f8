"""Kernels that all of PyTorch's threads run at once: how one is declared, and programs of several.

To wake PyTorch's threads and to come back to Python costs more than a kernel that works on one token. So a program runs
many launches with one call: the threads stay between them, and spin where they wait. At the end of a kernel a thread
waits for those that have drawn a part of it, but not for one whose core does something else, which comes back later.
"""

import ctypes
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Annotated, Any, Concatenate, Generic, ParamSpec, cast, get_args, get_origin

import numpy as np
import torch
from numba import types
from numba.np.numpy_support import carray
from numpy.typing import NDArray
from torch import Tensor

from app.gpu.kernels.cpu import Launch, run_on_torch_threads
from app.gpu.kernels.cpu.compile import c_function, inlined
from app.gpu.kernels.cpu.intrinsics import address_of, call, fetch_add, load, pointer, relax, store

P = ParamSpec("P")

ELEMENTS: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
    torch.float8_e4m3fn: np.uint8,
    torch.uint8: np.uint8,
    torch.int32: np.int32,
    torch.int64: np.int64,
}
"""What stands for a tensor's dtype inside a kernel; see `intrinsics.widen`."""
UNBOUNDED = 1 << 60
"""Elements of an array that is only known by its address."""


class ParallelKernel(Generic[P]):
    """A function whose calls run it on all of PyTorch's threads at once, which share the work with `draw`.

    Its signature says what a launch takes: tensors or None, of which the function gets one-dimensional arrays of what
    stands for their elements, without bounds, or None; ints and floats, which become int64 and float32; and, by keyword
    only, constants such as types and functions of Numba's. It is compiled once for each combination of dtypes, None
    among them, and constants.

    The first parameter is a record of all arguments under their names, for functions that take many; there a tensor is
    an address. The record has a tensor's first stride too, in elements, as `NAME_stride`; or strides and last sizes
    under the names in its annotation. The kernel trusts what it is given.
    """

    def __init__(self, body: Callable[Concatenate[Any, P], None]) -> None:
        _, *parameters = inspect.signature(body, eval_str=True).parameters.values()
        self._name, self._body = body.__qualname__, cast("FunctionType", body)
        given = [each for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        self._order = [each.name for each in given]
        self._constants = [each.name for each in parameters[len(given) :]]
        self._tensors: list[str] = []
        fields: dict[str, Any] = {"next_item": ctypes.c_int64}
        values, key = ["0"], list(self._constants)
        for each in given:
            kinds, source = _fields_of(each)
            fields |= kinds
            values.append(source)
            if len(kinds) > 1:
                self._tensors.append(each.name)
                key.append(f"None if {each.name} is None else {each.name}.dtype")
        taken = (each.name if each.default is each.empty else f"{each.name}={each.default}" for each in parameters)
        source = f"lambda *, {', '.join(taken)}: (({''.join(each + ', ' for each in key)}), ({', '.join(values)},))"
        self._read: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]] = eval(source)
        """Makes what it is compiled for, and the fields of its arguments, of those given. A loop takes 2 us longer."""
        self.arguments: type[ctypes.Structure] = type(self._name, (ctypes.Structure,), {"_fields_": [*fields.items()]})
        """What a launch reads: its parameters by name, tensors as addresses, and `next_item`, see `draw`."""
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, *args: P.args, **given: P.kwargs) -> ctypes.Structure:
        """Run it with arguments given by name. Returns them as the kernel has left them."""
        key, fields = self._read(**given)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(key)
        arguments = self.arguments(*fields)
        run_on_torch_threads(compiled.address, arguments)
        return arguments

    def _compile(self, key: tuple[Any, ...]) -> Any:
        """For constants and dtypes of tensors, as a C function of the address of `arguments`."""
        count = len(self._constants)
        dtypes = zip(self._tensors, key[count:], strict=True)
        elements = {name: ELEMENTS[dtype] for name, dtype in dtypes if dtype is not None}
        arrays = {name: f"carray(pointer(a.{name}), {UNBOUNDED}, {name})" for name in elements}
        tensors = dict.fromkeys(self._tensors, "None") | arrays
        body: Any = inlined(_with_constants(self._body, key[:count]))
        record = np.dtype(self.arguments)
        given = [tensors.get(name, f"a.{name}") for name in self._order]
        source = (
            f"def kernel(address):\n    a = carray(pointer(address), 1, record)[0]\n    body(a, {', '.join(given)})"
        )
        names = {"carray": carray, "pointer": pointer, "record": record, "body": body, **elements}
        exec(source, names)
        kernel: Any = names["kernel"]
        kernel.__qualname__, kernel.__module__ = self._name, self._body.__module__
        return c_function(kernel, body, repr(record), *key)


parallel = ParallelKernel
"""As a decorator of the function."""


def _fields_of(parameter: inspect.Parameter) -> tuple[dict[str, Any], str]:
    """Names and types of the fields that a parameter fills, several for a tensor, and the source of their values."""
    name, (kind, *named) = parameter.name, get_args(parameter.annotation) or (parameter.annotation,)
    if kind is not Tensor:
        return {name: ctypes.c_float if kind is float else ctypes.c_int64}, name
    values, fields = f"{name}.data_ptr(), {name}.stride(0)", [name, f"{name}_stride"]
    if get_origin(parameter.annotation) is Annotated:
        strides, sizes = named
        values = f"{name}.data_ptr(), *{name}.stride()[:{len(strides)}], *{name}.shape[-{len(sizes)}:]"
        fields = [name, *strides, *sizes]
    if parameter.default is None:
        values = f"*((0, 0) if {name} is None else ({values}))"
    return dict.fromkeys(fields, ctypes.c_int64), values


@inlined
def draw(a: Any) -> Any:
    """The number of the next item of a kernel's work, from 0 on; no other thread gets it. `a` is its record."""
    return fetch_add(address_of(a), 1)


def _with_constants(body: FunctionType, constants: tuple[Any, ...]) -> FunctionType:
    """The function with constants for what it takes by keyword only, as defaults of its last parameters. Numba makes
    LLVM's constants of those in the function itself, before its loops are vectorized.
    """
    code = body.__code__
    code = code.replace(co_argcount=code.co_argcount + code.co_kwonlyargcount, co_kwonlyargcount=0)
    return FunctionType(code, body.__globals__, body.__name__, constants, body.__closure__)


_ALIGNMENT = 64
"""Bytes: arguments of two kernels share no cache line."""
_SPINS = 2048
"""Looks at another thread, some 50 us, until a thread offers it the core: there may be more threads than cores."""
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
"""POSIX `sched_yield`."""


class Program:
    """Launches in their order. The owner keeps the memory that they work on."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._kinds = [type(given) for _, given in launches]
        sizes = [-(-ctypes.sizeof(given) // _ALIGNMENT) * _ALIGNMENT for _, given in launches]
        self._starts = np.cumsum([0, *sizes])
        self._fresh = np.zeros(self._starts[-1], np.uint8)
        for start, (_, given) in zip(self._starts.tolist(), launches, strict=False):
            self._fresh[start : start + ctypes.sizeof(given)] = np.frombuffer(bytes(given), np.uint8)
        self._fields: dict[str, NDArray[np.int64]] = {}
        """Where in the arguments of all launches a field is, counted in int64."""
        memory = np.empty(len(self._fresh) + _ALIGNMENT, np.uint8)
        self._used = memory[-memory.ctypes.data % _ALIGNMENT :][: len(self._fresh)]
        places = self._used.ctypes.data + self._starts[:-1]
        functions = np.array([function for function, _ in launches], np.int64)
        self._operations = np.ascontiguousarray(np.stack((functions, places), axis=1))
        self._inside = np.zeros((len(launches), _ALIGNMENT // 8), np.int64)

    def set(self, field: str, number: int) -> None:
        """Have all launches whose arguments have an int64 of that name find `number` there from now on."""
        if field not in self._fields:
            places = [
                start + getattr(kind, field).offset
                for start, kind in zip(self._starts.tolist(), self._kinds, strict=False)
                if hasattr(kind, field)
            ]
            self._fields[field] = np.array(places, np.int64) // 8
        self._fresh.view(np.int64)[self._fields[field]] = number

    def run(self, first: int, end: int) -> None:
        """Run launches `[first, end)` on PyTorch's threads, each when the one before it is done."""
        span = slice(self._starts[first], self._starts[end])
        self._used[span] = self._fresh[span]
        _run_operations(
            operations=self._operations[first:].ctypes.data, inside=self._inside[first:].ctypes.data, count=end - first
        )


@parallel
def _run_operations(a: Any, operations: int, inside: int, count: int) -> None:
    """`operations` is the address of `[count, 2]` int64: addresses of a function and of its arguments. `inside` is that
    of `[count, 8]` int64, a cache line each, whose first number says how many threads are in the operation. `next_item`
    is at most the number of those that are done.
    """
    address = address_of(a)
    each = carray(pointer(operations), (count, 2), np.int64)
    index = 0
    while index < count:
        own = inside + index * _ALIGNMENT
        fetch_add(own, 1)
        call(each[index, 0], each[index, 1])  # all that is to be done has been drawn when it returns
        fetch_add(own, -1)
        spins = 0
        while load(own) > 0:
            relax()
            spins += 1
            if spins == _SPINS:
                spins = 0
                _sched_yield()
        index += 1
        done = load(address)
        if done > index:
            index = done
        else:
            store(address, index)  # another thread may have stored more: then the next to look goes a longer way
