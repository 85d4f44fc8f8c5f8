"""Recording what a model gives a CPU to do: which kernels it launches, on which memory."""

import ctypes
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.gpu.kernels.cpu.openmp import recorded_by
from app.gpu.kernels.cpu.program import Launch

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_ZEROS = {_aten.zeros.default}


class NotRecordable(Exception):
    """The model computes something on a CPU that is no kernel of ours."""


class Arena:
    """Memory for tensors that live while layers are recorded: what one has given back, another one gets. It grows, and
    never moves.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._free: list[tuple[int, int]] = []
        """Size and address of each block that is free, the smallest first."""

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return sum(block.numel() for block in self._blocks)

    def take(self, nbytes: int) -> Tensor:
        """`[nbytes]` uint8, aligned to a cache line. The memory is free again when no tensor shares it any more."""
        place = bisect_left(self._free, (nbytes, 0))
        size, address = self._free.pop(place) if place < len(self._free) else self._grow(nbytes)
        owner = (ctypes.c_uint8 * size).from_address(address)
        finalize(owner, insort, self._free, (size, address)).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8)[:nbytes]

    def _grow(self, nbytes: int) -> tuple[int, int]:
        self._blocks.append(torch.empty(max(1, nbytes), dtype=torch.uint8))
        return self._blocks[-1].numel(), self._blocks[-1].data_ptr()


def outliving(tensor: Tensor) -> Tensor:
    """The same dense memory of an arena, which must live on, as a tensor that does not keep it: others may get it."""
    memory = (ctypes.c_uint8 * (tensor.numel() * tensor.itemsize)).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class Recording(TorchDispatchMode):
    """While it is active, the thread's launches are kept, not run, and tensors are made in an arena.

    PyTorch's own operators may only make tensors and views: one that computes, or reads a value, raises NotRecordable.
    `tolist` and `numpy` are no operators, and are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self.state: list[Tensor] = []
        """Tensors of zeros: its users leave it so, and finds it so in the next replay."""
        self._arena = Arena()

    @contextmanager
    def within(self, arena: Arena) -> Iterator[None]:
        """Record, with tensors in `arena`."""
        self._arena = arena
        with recorded_by(self), self:
            yield

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler to keep it out of the mode: two seconds within the first decode step."""
        return False

    def launched(self, function: int, arguments: ctypes.Structure) -> None:
        """See `Recorder`."""
        self.launches.append(Launch(function, arguments))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            return self._place(result)
        if func in _ZEROS:
            self.state.append(result)
        elif func._schema.is_mutable or not _memory_of(result) or not _memory_of(result) <= _memory_of((args, kwargs)):
            raise NotRecordable(f"{func} computes")
        return result

    def _place(self, like: Tensor) -> Tensor:
        memory = self._arena.take(like.untyped_storage().nbytes()).view(like.dtype)
        return memory.as_strided(like.shape, like.stride())


def _memory_of(values: Any) -> set[int]:
    """Where the memory of all tensors in `values` begins. A view, and nothing else, has that of its argument. oneDNN's
    do not tell.
    """
    tensors = (each for each in tree_leaves(values) if isinstance(each, Tensor) and not each.is_mkldnn)
    return {each.untyped_storage().data_ptr() for each in tensors}
