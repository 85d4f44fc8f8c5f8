"""What the runner needs of a model: a stack of layers that can be entered and left at any boundary."""

from typing import Protocol

import torch
from torch import Tensor

from app.gpu.kernels.attention.base import Batch

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Relative L2 error of the logits that rounding may cause; a misread architecture or a wrong graph is far above it."""


class LayerStack(Protocol):
    """A decoder as separate steps. All state is an argument, so two cohorts at different layers can coexist."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    kv_heads: int
    """Those whose KV is here: of a shard, its own."""
    head_dim: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    parameter_bytes: int
    """Of the whole model."""

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and positions, `[tokens]` int64 each, to the residual stream `[tokens, hidden_size]`."""
        ...

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        """Run layer `index` on `hidden` `[tokens, hidden_size]`; returns the same shape, in a tensor of its own.

        `kv` is this layer's part of the pool, `[blocks, 2, kv_heads, block_size, head_dim]`; the batch's keys and
        values are written to it. The result is what Transformers calls `hidden_states[index + 1]` (before the final
        norm).
        """
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Final norm and output projection: `[rows, hidden_size]` to float32 logits `[rows, vocab_size]`."""
        ...
