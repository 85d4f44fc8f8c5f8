"""The one attention interface: store this step's keys and values, then attend through the block tables."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from app.gpu.kernels.attention.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer's attention needs beside its tensors.

    `scale` multiplies the scores. `window` is the number of most recent keys a query sees, itself included (None: all).
    `softcap` bounds scores to `softcap * tanh(score / softcap)` as Gemma 2 does (None: off).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class Attention(Protocol):
    """A backend. Stateless between calls: everything it needs is an argument."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        """Write `key` and `value` at the batch's slots of `kv`, then attend causally.

        query: `[tokens, heads, head_dim]`; key, value: `[tokens, kv_heads, head_dim]`;
        kv: one layer of the pool, `[blocks, 2, kv_heads, block_size, columns]`, any strides with the last two dense.
        Its dtype is that of the queries, or a half type under float32, or float8; see `pool_rows`. Keys and values are
        rounded to it, to nearest even, and what a query sees is what the pool holds: of its own token and its batch
        too.
        `heads` is a multiple of `kv_heads`; query head h reads key head `h // (heads // kv_heads)`.
        Returns `[tokens, heads, head_dim]`, contiguous.
        """
        ...
