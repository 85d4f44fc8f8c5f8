"""How attention of Transformers' modules reads and writes the pages of KV.

Most modules call the function that their config names. Djinn's is `paged_attention`, in which all rows of a batch
attend together. Other modules attend by themselves, over what their cache gives back, with masks and biases of their
own. They run row by row, each with a cache from `row_cache`: it stores the row's new keys and values in the pages, and
gathers those of all its tokens.
"""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicLayer

from app.gpu.kernels.attention.base import AttentionSpec, Batch, RowShape, from_rows, to_rows

NAME = "djinn_paged"
"""Of `paged_attention`, in a config."""
Attend = Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]
"""`Attention` over the batch and the KV of one layer's call: of queries, keys, values and a spec."""
Exchange = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a row's new keys and values, and gives all that the row has: `[1, heads, tokens, dim]` each."""
Read = Callable[[], tuple[Tensor, Tensor]]
"""Gives the batch's keys and values that an earlier layer has stored, `[1, heads, tokens, dim]` each."""
_call = threading.local()
"""Of the layer that this thread runs: `attend`, `exchange`, `read`, and the `window` of the mask that its attention
had. Not every architecture passes keyword arguments on to attention.
"""
_WITHOUT_EFFECT = {"cache_position", "dropout", "is_causal", "position_ids", "use_cache"}
"""Keywords that reach attention and change nothing here: positions are in the batch, there is no dropout outside
training, no cache but the pool, and causality is implied."""


def enter_layer(attend: Attend, exchange: Exchange, read: Read | None = None, window: int | None = None) -> None:
    """What the next layer of this thread does with keys and values."""
    _call.attend, _call.exchange, _call.read, _call.window = attend, exchange, read, window


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | EllipsisType | None = ...,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function Transformers calls: query and key `[1, heads, tokens, head_dim]`, value `[1, heads, tokens, value
    dim]`, result `[1, tokens, heads, value dim]`.

    Raises ValueError for a model that asks of attention what `AttentionSpec` cannot say.
    """
    extra = sorted(name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT)
    if extra:
        raise ValueError(f"its attention takes {', '.join(extra)}")
    window = _call.window if isinstance(sliding_window, EllipsisType) else sliding_window
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ValueError("its attention is not causal")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    sinks = None if s_aux is None else s_aux.float()
    return _call.attend(query, key, value, AttentionSpec(scale, window, softcap, sinks))[None], None


AttentionInterface.register(NAME, paged_attention)


class _RowLayer(DynamicLayer):
    """A layer of a row that has had `length` tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._length = length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = _call.exchange(key_states, value_states)
        return keys, values

    def get_seq_length(self) -> int:
        return self._length


def row_cache(length: int, layers: int) -> Cache:
    """What a row's modules take for their cache, after `length` tokens."""
    return Cache(layers=[_RowLayer(length)] * layers)


class SharedKV(UserDict[str, tuple[Tensor, Tensor]]):
    """Stands in the place of what layers pass keys and values on by: those that share a layer's read its pages. So a
    row may join above that layer.
    """

    def __getitem__(self, key: str) -> tuple[Tensor, Tensor]:
        keys, values = _call.read()
        return keys, values

    def __setitem__(self, key: str, item: tuple[Tensor, Tensor]) -> None:
        """The layer stores them in its pages."""


def write_pages(kv: Tensor, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor) -> None:
    """Store keys and values `[tokens, kv_heads, head_dim]` at places of `kv`, one layer of the pool."""
    for kind, states in enumerate((key, value)):
        kv[blocks, kind, :, offsets] = to_rows(states, kv.dtype)


def read_pages(kv: Tensor, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The keys and values at places of `kv`, `[tokens, kv_heads, head_dim]` each, as `dtype`."""
    keys, values = (from_rows(kv[blocks, kind, :, offsets], dtype) for kind in range(2))
    return keys, values


def row_of(batch: Batch, index: int) -> Batch:
    """Row `index` of `batch` by itself; its states are a view of the batch's."""
    row = batch.rows[index]
    tokens, place = slice(row.start, row.start + row.length), slice(index, index + 1)
    return Batch(
        rows=(RowShape(0, row.length, row.context),),
        decodes=int(row.length == 1),
        positions=batch.positions[tokens],
        slot_blocks=batch.slot_blocks[tokens],
        slot_offsets=batch.slot_offsets[tokens],
        block_tables=batch.block_tables[place],
        contexts=batch.contexts[place],
        states=None if batch.states is None else batch.states[place],
        token_ids=None if batch.token_ids is None else batch.token_ids[tokens],
    )
