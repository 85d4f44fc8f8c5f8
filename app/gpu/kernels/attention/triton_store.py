"""A Triton kernel that stores new keys and values in their slots of the pool."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.gpu.kernels.attention.pool_rows import FLOAT8
from app.gpu.kernels.linear.cuda.triton_rounding import encode, inverse, magnitude, scale_bits


def store(key: Tensor, value: Tensor, kv: Tensor, slot_blocks: Tensor, slot_offsets: Tensor) -> None:
    """Write `key` and `value`, `[tokens, kv_heads, head_dim]` with the last axis dense, to the tokens' slots.

    kv: `[blocks, 2, kv_heads, block_size, columns]`, the last two axes dense; both are rounded to its dtype, see
    `pool_rows`.
    slot_blocks, slot_offsets: `[tokens]` int64. A token whose slot block is negative is stored nowhere.
    """
    tokens, kv_heads, head_dim = key.shape
    block_stride, value_offset, head_stride, *_ = kv.stride()
    scaled = kv.dtype is FLOAT8
    _store[(tokens,)](
        key,
        value,
        kv.view(torch.uint8) if scaled else kv,
        kv.view(torch.int32) if scaled else None,
        slot_blocks,
        slot_offsets,
        *key.stride()[:2],
        *value.stride()[:2],
        block_stride,
        value_offset,
        head_stride,
        kv_heads=kv_heads,
        head_dim=head_dim,
        columns=kv.shape[4],
        scaled=scaled,
        tile_heads=triton.next_power_of_2(kv_heads),
        tile_dims=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _store(
    key: tl.tensor,
    value: tl.tensor,
    pool: tl.tensor,
    scales: tl.tensor,
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
    columns: tl.constexpr,
    scaled: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_dims: tl.constexpr,
) -> None:
    """One program stores one token: `[kv_heads, head_dim]` of each, padded to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(slot_blocks + token)
    heads = tl.arange(0, tile_heads)[:, None]
    dims = tl.arange(0, tile_dims)[None, :]
    real = (heads < kv_heads) & (dims < head_dim) & (block >= 0)
    new_key = tl.load(key + token * key_stride + heads * key_head_stride + dims, mask=real, other=0.0)
    new_value = tl.load(value + token * value_stride + heads * value_head_stride + dims, mask=real, other=0.0)
    slot = block * block_stride + tl.load(slot_offsets + token) * columns + heads * head_stride
    if scaled:
        of_row = (heads < kv_heads) & (block >= 0)
        _store_scaled(pool, scales, slot, new_key, dims, real, of_row, head_dim)
        _store_scaled(pool, scales, slot + value_offset, new_value, dims, real, of_row, head_dim)
    else:
        tl.store(pool + slot + dims, new_key.to(pool.dtype.element_ty), mask=real)
        tl.store(pool + slot + value_offset + dims, new_value.to(pool.dtype.element_ty), mask=real)


@triton.jit
def _store_scaled(
    pool: tl.tensor,
    scales: tl.tensor,
    slot: tl.tensor,
    states: tl.tensor,
    dims: tl.tensor,
    real: tl.tensor,
    of_row: tl.tensor,
    head_dim: tl.constexpr,
) -> None:
    """Round `[tile_heads, tile_dims]`, zeros where not `real`, to rows of float8 that begin at `slot`."""
    states = states.to(tl.float32)
    bits = scale_bits(tl.max(magnitude(states), 1)[:, None])
    tl.store(pool + slot + dims, encode(states * inverse(bits)), mask=real)
    tl.store(scales + (slot + head_dim) // 4, bits, mask=of_row)
