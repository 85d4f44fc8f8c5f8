"""The tensor that holds every KV block on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from app.gpu.models.base import LayerStack
from app.gpu.zeroed import zeroed


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
