"""Triton kernels for what lies between a layer's matrix products, and for a graph's inputs: one launch each, instead of
one for each operator.

Each computes in float32 and rounds once. A program has a row, or a part of one, to itself: a row's bits depend on no
other row. Triton compiles another kernel for tensors that begin or step at no multiple of 16, which might sum in
another order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.gpu.kernels.attention.base import Batch

TILE = 1024
"""Values of a row that one program of `silu_mul` has."""
WIDE, WIDE_WARPS, WARPS = 2048, 8, 4
"""From that many values on a row has more warps."""
BLOCKS = 256
"""Of a row's block table: so many are copied at once."""


def rotate(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """`elementwise.rotate`, a token in each program."""
    tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _rotate[(tokens,)](
            x,
            table,
            positions,
            out,
            *x.stride()[:2],
            heads=heads,
            width=head_dim,
            half=table.shape[1] // 2,
            tile_heads=triton.next_power_of_2(heads),
            tile_half=triton.next_power_of_2(table.shape[1] // 2),
            tile_rest=triton.next_power_of_2(head_dim - table.shape[1]),
        )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """`elementwise.silu_mul`, a part of a row in each program."""
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    with torch.cuda.device_of(gate_up):
        _silu_mul[(tokens, triton.cdiv(inner, TILE))](gate_up, out, gate_up.stride(0), inner=inner, tile=TILE)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`elementwise.rms_norm`, a row or a head in each program."""
    heads, width = weight.shape if weight.dim() == 2 else (1, weight.shape[0])
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _rms_norm[(len(x), heads)](
            x,
            weight,
            normed,
            x.stride(0),
            eps,
            width=width,
            tile=triton.next_power_of_2(width),
            num_warps=WIDE_WARPS if width >= WIDE else WARPS,
        )
    return normed


def add_rms_norm(x: Tensor, other: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`elementwise.add_rms_norm`, a row in each program."""
    tokens, width = x.shape
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _add_rms_norm[(tokens,)](
            x,
            other,
            weight,
            normed,
            other.stride(0),
            eps,
            width=width,
            tile=triton.next_power_of_2(width),
            num_warps=WIDE_WARPS if width >= WIDE else WARPS,
        )
    return x, normed


def fill_inputs(token_ids: Tensor, batch: Batch, columns: Tensor, contexts: Tensor, tables: Tensor, rows: int) -> None:
    """Write a step of one token a row to a graph's inputs, and padding up to `rows`; the rest of each block table stays
    as it is.

    token_ids: `[count]` int64, of the `batch`, with at most `rows` rows.
    columns: `[4, most rows]` int64: token ids, positions, slot blocks, slot offsets; contexts: `[most rows]` int32;
    tables: `[most rows, blocks]` int32, at least as wide as the batch's. Each is dense.
    """
    count, width = batch.block_tables.shape
    with torch.cuda.device_of(columns):
        _fill[(rows,)](
            token_ids,
            batch.positions,
            batch.slot_blocks,
            batch.slot_offsets,
            batch.contexts,
            batch.block_tables,
            columns,
            contexts,
            tables,
            count,
            width,
            columns.shape[1],
            tables.shape[1],
            tile=BLOCKS,
            num_warps=1,
        )


@triton.jit
def _rotate(
    x: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    half: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_half: tl.constexpr,
    tile_rest: tl.constexpr,
) -> None:
    """One program has one token: it rotates `[heads, 2 * half]`, padded to powers of two, and copies what is left of
    `[heads, width]`.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, tile_heads)[:, None]
    at = tl.arange(0, tile_half)[None, :]
    angle = table + tl.load(positions + token) * (2 * half) + at
    cos = tl.load(angle, mask=at < half, other=0.0).to(tl.float32)
    sin = tl.load(angle + half, mask=at < half, other=0.0).to(tl.float32)
    real = (head < heads) & (at < half)
    value = x + token * token_stride + head * head_stride + at
    first = tl.load(value, mask=real, other=0.0).to(tl.float32)
    second = tl.load(value + half, mask=real, other=0.0).to(tl.float32)
    rotated = out + (token * heads + head) * width + at
    tl.store(rotated, (first * cos - second * sin).to(out.dtype.element_ty), mask=real)
    tl.store(rotated + half, (second * cos + first * sin).to(out.dtype.element_ty), mask=real)
    if width > 2 * half:
        last = 2 * half + tl.arange(0, tile_rest)[None, :]
        there = (head < heads) & (last < width)
        kept = tl.load(x + token * token_stride + head * head_stride + last, mask=there)
        tl.store(out + (token * heads + head) * width + last, kept, mask=there)


@triton.jit
def _silu_mul(gate_up: tl.tensor, out: tl.tensor, stride: tl.tensor, inner: tl.constexpr, tile: tl.constexpr) -> None:
    """One program has `tile` values of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    real = at < inner
    gate = tl.load(gate_up + row * stride + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + inner + at, mask=real, other=0.0).to(tl.float32)
    shrunk = tl.exp(-tl.abs(gate))  # overflows for no gate
    silu = gate * tl.where(gate < 0, shrunk, 1.0) / (1 + shrunk)
    tl.store(out + row * inner + at, (silu * up).to(out.dtype.element_ty), mask=real)


@triton.jit
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """One program has one head of one row; a row without heads is one head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, tile)
    real = at < width
    wide = tl.load(x + row * stride + head * width + at, mask=real, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + head * width + at, mask=real, other=0.0).to(tl.float32)
    here = normed + (row * tl.num_programs(1) + head) * width + at
    tl.store(here, (wide * scale * factor).to(normed.dtype.element_ty), mask=real)


@triton.jit
def _add_rms_norm(
    x: tl.tensor,
    other: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    other_stride: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """One program has one row. What is normed is the sum as it is stored."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, tile)
    real = at < width
    here = x + row * width + at
    more = tl.load(other + row * other_stride + at, mask=real, other=0.0).to(tl.float32)
    total = (tl.load(here, mask=real, other=0.0).to(tl.float32) + more).to(x.dtype.element_ty)
    tl.store(here, total, mask=real)
    wide = total.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    tl.store(normed + row * width + at, (wide * scale * factor).to(x.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["count", "width", "most_rows", "table_stride"])
def _fill(
    token_ids: tl.tensor,
    positions: tl.tensor,
    slot_blocks: tl.tensor,
    slot_offsets: tl.tensor,
    given_contexts: tl.tensor,
    given_tables: tl.tensor,
    columns: tl.tensor,
    contexts: tl.tensor,
    tables: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    most_rows: tl.tensor,
    table_stride: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """One program has one row: a given one, or one of padding."""
    row = tl.program_id(0)
    given = row < count
    tl.store(columns + row, tl.load(token_ids + row, mask=given, other=0))
    tl.store(columns + most_rows + row, tl.load(positions + row, mask=given, other=0))
    tl.store(columns + 2 * most_rows + row, tl.load(slot_blocks + row, mask=given, other=-1))
    tl.store(columns + 3 * most_rows + row, tl.load(slot_offsets + row, mask=given, other=0))
    tl.store(contexts + row, tl.load(given_contexts + row, mask=given, other=0))
    source, target = given_tables + row.to(tl.int64) * width, tables + row.to(tl.int64) * table_stride
    tl.store(target, 0, mask=row >= count)
    for first in range(0, width, tile):
        at = first + tl.arange(0, tile)
        real = given & (at < width)
        tl.store(target + at, tl.load(source + at, mask=real, other=0), mask=real)
