"""The tensor that holds every KV block on the device."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from app.gpu.models.base import LayerStack


class KVPool:
    """Block-major storage, `[blocks, layers, 2, kv_heads, block_size, head_dim]`: one block is one run of bytes."""

    def __init__(self, stack: LayerStack, num_blocks: int, block_size: int) -> None:
        shape = (num_blocks, stack.num_layers, 2, stack.kv_heads, block_size, stack.head_dim)
        self.data = zeroed(shape, stack.dtype, stack.device)
        self.block_size = block_size

    def layer(self, index: int) -> Tensor:
        """Layer `index` of every block: `[blocks, 2, kv_heads, block_size, head_dim]`, a view."""
        return self.data[:, index]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, `(source, target)` each, in order."""
        for source, target in copies:
            self.data[target].copy_(self.data[source])


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU the machine gives it page by page as it is written, in large pages where it has them:
    a budget that is not used costs nothing, and a server with a large one starts at once.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
