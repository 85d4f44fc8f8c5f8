"""Recording what a model gives a CPU to do: which kernels it launches, on which memory."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.gpu.cpu.openmp import recorded_by
from app.gpu.cpu.program import Launch

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_ZEROS = {_aten.zeros.default}
_PAGE = 1 << 20
_ALIGNMENT = 64


class NotRecordable(Exception):
    """The model computes something on a CPU that is no kernel of ours."""


class Arena:
    """Memory for the tensors of one layer at a time. It grows, and never moves."""

    def __init__(self) -> None:
        self._pages: list[Tensor] = []
        self.rewind()

    def rewind(self) -> None:
        """Give the same memory again: nobody reads what was there."""
        self._page, self._used = 0, 0

    def take(self, nbytes: int) -> Tensor:
        """`[nbytes]` uint8, aligned to a cache line."""
        while self._page < len(self._pages):
            end = self._used + nbytes
            if end <= self._pages[self._page].numel():
                begin, self._used = self._used, -(-end // _ALIGNMENT) * _ALIGNMENT
                return self._pages[self._page][begin:end]
            self._page, self._used = self._page + 1, 0
        self._pages.append(torch.empty(max(_PAGE, nbytes), dtype=torch.uint8))
        return self.take(nbytes)


class Recording(TorchDispatchMode):
    """While it is active, the thread's launches are kept, not run, and tensors are made in an arena.

    PyTorch's own operators may only make tensors and views: one that computes, or reads a value, raises NotRecordable.
    `tolist` and `numpy` are no operators, and are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self.state: list[Tensor] = []
        """Tensors of zeros: whoever asks for one leaves it so, and finds it so in the next replay."""
        self._arena = Arena()

    @contextmanager
    def within(self, arena: Arena) -> Iterator[None]:
        """Record, with tensors in `arena`, from its start."""
        arena.rewind()
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
