"""How a bundle's tensors lie in one run of bytes, in memory and in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.gpu.weights.alignment import aligned


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a bundle, dense, `offset` bytes from the bundle's start."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """The tensor in its bundle's `memory`, uint8, which must be aligned."""
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class BundleLayout:
    """The tensors of a bundle and its bytes, a multiple of `ALIGNMENT`."""

    pieces: tuple[Piece, ...]
    nbytes: int

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> BundleLayout:
        """The layout of dense tensors, on whatever device, `meta` included, one after the other."""
        pieces, end = [], 0
        for tensor in tensors:
            pieces.append(Piece(tuple(tensor.shape), tensor.dtype, end))
            end += aligned(tensor.nbytes)
        return BundleLayout(tuple(pieces), end)

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in `memory`, `[nbytes]` uint8, which must be aligned: views."""
        return [piece.view(memory) for piece in self.pieces]


def host_bytes(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor on the host, flat; writing to it writes to the tensor."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
