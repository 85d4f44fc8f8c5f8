"""Attention over the paged pool of keys and values: which kernels a device has, and its probabilities by themselves."""

import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from app.gpu.kernels.attention.base import Attention, AttentionSpec, from_rows

_QUERIES = 256
"""At once: of keys behind the last of them nothing is computed."""


def attention_for(device: torch.device, *, batch_invariant: bool = False, in_bfloat16: bool = False) -> Attention:
    """The fastest attention for `device`, a CPU or a CUDA device. With `batch_invariant` no token's result depends on
    other tokens of its batch, nor on how its prompt is cut. With `in_bfloat16` a CPU multiplies prompts in bfloat16.
    """
    if device.type == "cuda":
        from app.gpu.kernels.attention.cuda import attend_on_cuda  # imports Triton, which only a GPU needs

        return partial(attend_on_cuda, batch_invariant=batch_invariant)
    from app.gpu.kernels.attention.cpu import attend_on_cpu  # imports Numba, which only a CPU needs

    return partial(attend_on_cpu, batch_invariant=batch_invariant, in_bfloat16=in_bfloat16)


def tokens_alike(device: torch.device, *, batch_invariant: bool) -> int:
    """The longest row whose tokens each get the bits that they would get alone, from `attention_for` the same."""
    if batch_invariant:
        return sys.maxsize
    if device.type != "cpu":
        return 1
    from app.gpu.kernels.attention.cpu import PAGED_TOKENS

    return PAGED_TOKENS


def attention_pattern(
    query: Tensor, kv: Tensor, table: Tensor, positions: Sequence[int], spec: AttentionSpec, heads: Sequence[int]
) -> Tensor:
    """The share of each key in the attention of some queries of one row, float32 `[queries, heads, keys]`: computed
    once more, as no backend has it as a tensor, and is fast for that reason (Dao et al., arXiv:2205.14135).

    query: `[queries, all heads, head_dim]`, at `positions`, which rise; kv: as in `Attention`, with the keys of all
    positions up to the last; table: `[blocks]`, the row's. There is a key for each of these positions, and its share is
    0 where a query does not see it. A sink takes its part and is none of the keys.
    """
    if query.device.type == "cpu":
        from app.gpu.kernels.attention.cpu.pattern import pattern  # imports Numba, which only a CPU needs

        return pattern(query, kv, table, positions, spec, heads)
    return pattern_by_operators(query, kv, table, positions, spec, heads)


def pattern_by_operators(
    query: Tensor, kv: Tensor, table: Tensor, positions: Sequence[int], spec: AttentionSpec, heads: Sequence[int]
) -> Tensor:
    """The same with PyTorch's operators, of which none waits for the device."""
    device, context, block_size = query.device, positions[-1] + 1, kv.shape[3]
    at, chosen = (torch.tensor(each).to(device, non_blocking=True) for each in (positions, list(heads)))
    blocks, group = table[: -(-context // block_size)].long(), query.shape[1] // kv.shape[2]
    rows = from_rows(kv[blocks[:, None], 0, (chosen // group)[None]], torch.float32)  # [blocks, heads, in block, dim]
    keys = rows.permute(1, 3, 0, 2).flatten(2)[..., :context]
    queries = query.index_select(1, chosen).transpose(0, 1).float() * spec.scale
    behind, sinks = torch.arange(context, device=device), None
    if spec.sinks is not None:
        sinks = spec.sinks.index_select(0, chosen).float()[:, None, None]
    found = torch.zeros(len(positions), len(heads), context, device=device)
    for begin in range(0, len(positions), _QUERIES):
        some, end = slice(begin, begin + _QUERIES), positions[min(begin + _QUERIES, len(positions)) - 1] + 1
        first = 0 if spec.window is None else max(0, positions[begin] + 1 - spec.window)
        scores = queries[:, some] @ keys[..., first:end]
        if spec.softcap is not None:
            scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
        distance = at[some, None] - behind[None, first:end]
        hidden = distance < 0 if spec.window is None else (distance < 0) | (distance >= spec.window)
        scores.masked_fill_(hidden, -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        if sinks is not None:
            total = torch.logaddexp(total, sinks)
        torch.exp(scores.sub_(total), out=scores)
        found[some, :, first:end] = scores.transpose(0, 1)
    return found
