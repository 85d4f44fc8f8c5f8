"""A Triton kernel that stores new keys and values in their slots of the pool."""

import triton
import triton.language as tl
from torch import Tensor


def store(key: Tensor, value: Tensor, kv: Tensor, slot_blocks: Tensor, slot_offsets: Tensor) -> None:
    """Write `key` and `value`, `[tokens, kv_heads, head_dim]` with the last axis dense, to the tokens' slots.

    kv: `[blocks, 2, kv_heads, block_size, head_dim]`, the last two axes dense; both are rounded to its dtype.
    slot_blocks, slot_offsets: `[tokens]` int64. A token whose slot block is negative is stored nowhere.
    """
    tokens, kv_heads, head_dim = key.shape
    block_stride, value_offset, head_stride, *_ = kv.stride()
    _store[(tokens,)](
        key,
        value,
        kv,
        slot_blocks,
        slot_offsets,
        *key.stride()[:2],
        *value.stride()[:2],
        block_stride,
        value_offset,
        head_stride,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tile_heads=triton.next_power_of_2(kv_heads),
        tile_dims=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _store(
    key: tl.tensor,
    value: tl.tensor,
    pool: tl.tensor,
    slot_blocks: tl.tensor,
    slot_offsets: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    block_stride: tl.tensor,
    value_offset: tl.tensor,
    head_stride: tl.tensor,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_dims: tl.constexpr,
) -> None:
    """One program stores one token: `[kv_heads, head_dim]` of each, padded to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(slot_blocks + token)
    heads = tl.arange(0, tile_heads)[:, None]
    dims = tl.arange(0, tile_dims)[None, :]
    real = (heads < kv_heads) & (dims < head_dim) & (block >= 0)
    new_key = tl.load(key + token * key_stride + heads * key_head_stride + dims, mask=real)
    new_value = tl.load(value + token * value_stride + heads * value_head_stride + dims, mask=real)
    slot = pool + block * block_stride + tl.load(slot_offsets + token) * head_dim + heads * head_stride + dims
    tl.store(slot, new_key.to(pool.dtype.element_ty), mask=real)
    tl.store(slot + value_offset, new_value.to(pool.dtype.element_ty), mask=real)
