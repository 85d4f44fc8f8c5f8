"""Attention in plain PyTorch, one row at a time: the oracle of the kernels. Clear, not fast."""

import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.kernels.attention.base import AttentionSpec, Batch, RowShape, from_rows, to_rows


class ReferenceAttention:
    """Gathers each row's blocks into contiguous keys and values of the queries' dtype, then attends over them. Any
    device, any dtypes.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        """As `Attention` says."""
        kv[batch.slot_blocks, 0, :, batch.slot_offsets] = to_rows(key, kv.dtype)
        kv[batch.slot_blocks, 1, :, batch.slot_offsets] = to_rows(value, kv.dtype)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for row, table in zip(batch.rows, batch.block_tables, strict=True):
            tokens = slice(row.start, row.start + row.length)
            keys, values = (from_rows(each, query.dtype) for each in _gather(kv, table, row.context))
            attended = _attend(query[tokens].transpose(0, 1), keys, values, _visible(row, spec, kv.device), spec)
            output[tokens] = attended.transpose(0, 1)
        return output


def _gather(kv: Tensor, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """The keys and the values of one row in order, each `[kv_heads, context, columns]`."""
    block_size = kv.shape[3]
    blocks = kv[table[: -(-context // block_size)]]
    keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
    return keys, values


def _visible(row: RowShape, spec: AttentionSpec, device: torch.device) -> Tensor:
    """`[length, context]` bool: which keys each of the row's queries sees."""
    keys = torch.arange(row.context, device=device)
    queries = keys[row.context - row.length :, None]
    visible = keys <= queries
    if spec.window is not None:
        visible &= keys > queries - spec.window
    return visible


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, spec: AttentionSpec) -> Tensor:
    """`[heads, length, head_dim]` queries over `[kv_heads, context, head_dim]` keys and values."""
    if spec.softcap is None and spec.sinks is None:
        # SDPA takes its fused path only with a batch axis.
        return F.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=visible, scale=spec.scale, enable_gqa=True
        )[0]
    groups = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    scores = (query @ keys.transpose(1, 2)).float() * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks[:, None, None].expand(*scores.shape[:2], 1)), 2)
    return scores.softmax(-1)[..., : keys.shape[1]].to(values.dtype) @ values
