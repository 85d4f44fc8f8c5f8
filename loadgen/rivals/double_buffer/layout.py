"""How the tensors of a bundle, which are needed at once, lie in one run of bytes."""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes: a cache line, and the widest load of a CPU."""


class Layout:
    """Dense tensors of these shapes and one type, one after the other."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._spans: list[tuple[int, int]] = []
        self.nbytes = 0
        for shape in shapes:
            size = torch.Size(shape).numel() * dtype.itemsize
            self._spans.append((self.nbytes, self.nbytes + size))
            self.nbytes += -(-size // ALIGNMENT) * ALIGNMENT

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Their bytes, `[nbytes]` uint8."""
        memory = torch.zeros(self.nbytes, dtype=torch.uint8)
        for view, tensor in zip(self.views(memory), tensors, strict=True):
            view.copy_(tensor)
        return memory

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in `memory`, uint8 and at least `nbytes` of it."""
        return [
            memory[start:end].view(self._dtype).view(shape)
            for (start, end), shape in zip(self._spans, self._shapes, strict=True)
        ]
