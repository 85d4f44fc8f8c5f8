"""A Triton kernel that joins the parts of attention whose keys were split (flash-decoding)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Parts:
    """What each split of each query saw, float32. Where it saw nothing, the total is 0 and the sum is not written.

    sums: `[tokens, heads, splits, head_dim]`, values weighted by `2 ** (score - peak)`; peaks, totals: `[tokens, heads,
    splits]`, the highest score in units of log 2, and the sum of the weights.
    """

    sums: Tensor
    peaks: Tensor
    totals: Tensor

    @classmethod
    def empty(cls, tokens: int, heads: int, splits: int, head_dim: int, device: torch.device) -> Parts:
        """Room for the parts, not initialised."""
        shape = (tokens, heads, splits)
        return cls(
            *(torch.empty(size, dtype=torch.float32, device=device) for size in ((*shape, head_dim), shape, shape))
        )


def merge(parts: Parts, output: Tensor) -> None:
    """Write the joined `[tokens, heads, head_dim]`, contiguous, to `output`; zeros where no split saw anything."""
    tokens, heads, splits, head_dim = parts.sums.shape
    _merge[(tokens, heads)](
        parts.sums,
        parts.peaks,
        parts.totals,
        output,
        splits,
        head_dim=head_dim,
        tile_splits=MAX_SPLITS,
        tile_dims=triton.next_power_of_2(head_dim),
    )


@triton.jit(do_not_specialize=["splits"])
def _merge(
    sums: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    output: tl.tensor,
    splits: tl.tensor,
    head_dim: tl.constexpr,
    tile_splits: tl.constexpr,
    tile_dims: tl.constexpr,
) -> None:
    """One program joins the splits of one head of one token."""
    query = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    part = tl.arange(0, tile_splits)
    dims = tl.arange(0, tile_dims)
    at = query * splits + part
    total = tl.load(totals + at, mask=part < splits, other=0.0)
    seen = total != 0  # not-a-number counts, so that it shows
    peak = tl.load(peaks + at, mask=seen, other=float("-inf"))
    highest = tl.max(peak, 0)
    weight = tl.exp2(peak - tl.where(highest == float("-inf"), 0.0, highest))
    real = seen[:, None] & (dims < head_dim)[None, :]
    sum_at = sums + at[:, None] * head_dim + dims[None, :]
    joined = tl.sum(tl.load(sum_at, mask=real, other=0.0) * weight[:, None], 0)
    whole = tl.sum(total * weight, 0)
    joined = joined / tl.where(whole == 0, 1.0, whole)
    tl.store(output + query * head_dim + dims, joined, mask=dims < head_dim)
