"""Attention probabilities, computed once more: no backend has them as a tensor, and is fast for that reason (Dao et
al., arXiv:2205.14135). They follow from queries and from the keys that the pool holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from app.gpu.kernels.attention.base import AttentionSpec, from_rows

_QUERIES = 256
"""At once: of keys behind the last of them nothing is computed."""


def attention_pattern(
    query: Tensor, kv: Tensor, table: Tensor, positions: Sequence[int], spec: AttentionSpec, heads: Sequence[int]
) -> Tensor:
    """The share of each key in the attention of some queries of one row, float32 `[queries, heads, keys]`.

    query: `[queries, all heads, head_dim]`, at `positions`, which rise; kv: as in `Attention`, with the keys of all
    positions up to the last; table: `[blocks]`, the row's. There is a key for each of these positions, and its share is
    0 where a query does not see it. A sink takes its part and is none of the keys.
    """
    context, block_size = positions[-1] + 1, kv.shape[3]
    blocks = table[: -(-context // block_size)].long()
    group = query.shape[1] // kv.shape[2]
    keys = torch.stack(
        [from_rows(kv[:, 0, head // group][blocks], torch.float32).flatten(0, 1)[:context] for head in heads]
    )
    queries = torch.stack([query[:, head] for head in heads]).float()
    at, behind = torch.tensor(positions), torch.arange(context, device=query.device)
    at = at.to(query.device, non_blocking=True)
    found = torch.zeros(len(positions), len(heads), context, device=query.device)
    for begin in range(0, len(positions), _QUERIES):
        some, end = slice(begin, begin + _QUERIES), positions[min(begin + _QUERIES, len(positions)) - 1] + 1
        first = 0 if spec.window is None else max(0, positions[begin] + 1 - spec.window)
        scores = queries[:, some] @ keys[:, first:end].transpose(1, 2)
        scores.mul_(spec.scale)
        if spec.softcap is not None:
            scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
        distance = at[some, None] - behind[None, first:end]
        hidden = distance < 0 if spec.window is None else (distance < 0) | (distance >= spec.window)
        scores.masked_fill_(hidden, -torch.inf)
        if spec.sinks is not None:
            sinks = torch.stack([spec.sinks[head] for head in heads])
            scores = torch.cat((scores, sinks[:, None, None].float().expand(-1, scores.shape[1], 1)), dim=2)
        shares = scores.softmax(dim=-1)[..., : end - first]
        found[some, :, first:end] = shares.transpose(0, 1)
    return found
