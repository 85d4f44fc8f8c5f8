"""The tensor that holds every KV block on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from app.gpu.device.memory import zeroed
from app.gpu.kernels.attention.pool_rows import columns_of
from app.gpu.models.base import LayerStack


class KVPool:
    """Block-major storage, `[blocks, layers, 2, kv_heads, block_size, columns]`: one block is one run of bytes. See
    `attention.pool_rows` for its last axis.
    """

    def __init__(
        self,
        stack: LayerStack,
        num_blocks: int,
        block_size: int,
        memory: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`memory`, uint8 zeros on the device, has the blocks at its start; None: they have memory of their own. Their
        elements are of `dtype`; None: as the stack computes.
        """
        dtype = dtype or stack.dtype
        columns = columns_of(stack.head_dim, dtype)
        shape = (num_blocks, stack.num_layers, 2, stack.kv_heads, block_size, columns)
        if memory is None:
            self.data = zeroed(shape, dtype, stack.device)
        else:
            size = torch.Size(shape).numel() * dtype.itemsize
            self.data = memory[:size].view(dtype).view(shape)
        self.block_size = block_size

    def layer(self, index: int) -> Tensor:
        """Layer `index` of every block: `[blocks, 2, kv_heads, block_size, columns]`, a view."""
        return self.data[:, index]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, `(source, target)` each, in order."""
        for source, target in copies:
            self.data[target].copy_(self.data[source])
