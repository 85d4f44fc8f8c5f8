"""The proof that a model on Transformers' modules, run layer by layer, gives what Transformers gives.

It is made when the model is loaded, for the first tokens of a sequence, and for some that come after thousands, whose
keys and values are random.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, DynamicLayer
from transformers.cache_utils import CacheLayerMixin, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from app.gpu.kernels.attention.base import make_batch
from app.gpu.models.base import TOLERANCE, LayerStack, with_new_states
from app.gpu.models.paging import write_pages
from app.gpu.state.layer_state import attending

TOKENS = 8
_PART = 2
"""Tokens of each part of a prefill."""
LENGTH = 8192 + 2 * TOKENS
"""Past the windows of most models, and the lengths that most were made for before their frequencies were scaled."""
_BLOCK = 16


class Past(DynamicLayer):
    """Random keys and values of a sequence's first `length` tokens, or latents that a layer makes them of, which every
    layer sees before its own.

    Values are large enough that their mean weighs as much as one key's would.
    """

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        """In tokens."""
        self._states: dict[Any, list[Tensor]] = {}
        """By shape, `[1, heads, length, dim]` each."""
        self.seen: tuple[Tensor, Tensor]
        """What the last layer that asked was given."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = key_states, value_states
        shapes = tuple(states.shape[1::2] for states in new)
        if shapes not in self._states:
            generator = torch.Generator(key_states.device).manual_seed(0)
            self._states[shapes] = [
                states.new_empty(*states.shape[:2], self.length, states.shape[3]).normal_(0, std, generator=generator)
                for states, std in zip(new, (1.0, self.length**0.5), strict=True)
            ]
        keys, values = (torch.cat(pair, 2) for pair in zip(self._states[shapes], new, strict=True))
        self.seen = keys, values
        return keys, values

    def get_seq_length(self) -> int:
        return self.length


def make_past(past: Past, config: Any, decoder: nn.Module, layers: int, *, folds: bool) -> Cache:
    """A cache with the `past` of every layer that attends, as Transformers makes it for this config."""
    if not folds:
        return Cache(layers=[past] * layers)
    if not getattr(config, "layer_types", None):  # RWKV, which takes no cache
        return Cache(layers=[LinearAttentionLayer()] * layers)
    minimax: Any = getattr(sys.modules[type(decoder).__module__], "MiniMaxCache", None)
    if minimax is not None:  # it has states, and layers for those that attend
        own = minimax()
        own.layers = [past] * layers
        own.linear_cache = [None] * layers
        return cast("Cache", own)
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionAndFullAttentionLayer):
            both: Any = LinearAttentionAndFullAttentionLayer()  # its state begins where its own tokens do
            both.update, both.get_seq_length = past.update, past.get_seq_length
            cache.layers[index] = both
        elif isinstance(layer, CacheLayerMixin):
            cache.layers[index] = past
    return cache


def prove(stack: LayerStack, sources: Sequence[int], tokens: Tensor, expected: Tensor) -> None:
    """Compare a prefill in two parts and some decode steps with the logits that the untouched model gave for `tokens`.
    Each layer is entered as if its rows joined there, and reads the keys and values that the layer `sources` names has
    stored.

    Finds layers that depend on more than their arguments: their own state, each other.
    """
    pool, logits, states = _empty_pool(stack, 1, stack.num_layers), [], None
    for span in [(0, _PART), (_PART, _PART), *((position, 1) for position in range(2 * _PART, TOKENS))]:
        batch = make_batch([span], [[0]], _BLOCK, stack.device)
        batch = with_new_states(stack, batch) if states is None else replace(batch, states=states)
        batch = replace(batch, token_ids=tokens[batch.positions])
        states = batch.states
        hidden = stack.embed(tokens[batch.positions], batch.positions)
        for index, source in enumerate(sources):
            hidden = stack.layer(index, hidden, replace(batch, positions=batch.positions.clone()), pool[:, source])
        logits.append(stack.head(hidden))
    _require_same(stack, torch.cat(logits), expected, "")


def prove_far(
    stack: LayerStack,
    sources: Sequence[int],
    length: int,
    look_back: Callable[[int], tuple[Tensor, Tensor]],
    tokens: Tensor,
    expected: Tensor,
) -> None:
    """Compare a step of two sequences, of which one has had `length` tokens before `tokens`, and the other none, with
    the logits of the untouched model. `look_back` gives the keys and values that a layer sees of that past.

    Finds what depends on a sequence's length, or on that of another one: windows, frequencies, scales.
    """
    count = len(tokens)
    blocks, places = -(-(length + count) // _BLOCK), torch.arange(length, device=stack.device)
    tables = [list(range(blocks)), [blocks]]
    batch = with_new_states(stack, make_batch([(length, count), (0, count)], tables, _BLOCK, stack.device))
    batch = replace(batch, token_ids=tokens.repeat(2))
    read_later = {source for index, source in enumerate(sources) if source != index}
    pools = {each: _empty_pool(stack, blocks + 1, 1)[:, 0] for each in (None, *read_later)}
    hidden = stack.embed(tokens.repeat(2), batch.positions)
    for index, (source, state) in enumerate(zip(sources, attending(stack.states), strict=True)):
        pool = pools[source if source in read_later else None]
        if state is not None:
            key, value = look_back(index)
            write_pages(pool, places // _BLOCK, places % _BLOCK, key[:length], value[:length])
        hidden = stack.layer(index, hidden, batch, pool)
    _require_same(stack, stack.head(hidden), expected, f" after {length} tokens")


def _empty_pool(stack: LayerStack, blocks: int, layers: int) -> Tensor:
    shape = (blocks, layers, 2, stack.kv_heads, _BLOCK, stack.head_dim)
    return torch.zeros(shape, dtype=stack.dtype, device=stack.device)


def _require_same(stack: LayerStack, logits: Tensor, expected: Tensor, where: str) -> None:
    error = float(torch.dist(logits, expected) / expected.norm())
    if not error < TOLERANCE[stack.dtype]:
        told = f"off by {error:.0%}" if math.isfinite(error) else "not finite"
        raise ValueError(f"run layer by layer, its logits are {told}{where}")


def window_of_mask(mask: Tensor | None) -> int | None:
    """The window of a layer that has this `mask` `[1, 1, queries, keys]`, where its last query does not see all."""
    if mask is None:
        return None
    seen = int((mask[0, 0, -1] == 0).sum())
    return seen if seen < mask.shape[3] else None


def require_window(mask: Tensor | None, window: int | None) -> None:
    """Raise ValueError if a layer's `mask` `[1, 1, queries, keys]` is another than that of its `window`; the queries
    are the last keys.
    """
    if mask is None:
        return
    queries, keys = mask.shape[2:]
    behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    expected = (behind >= 0) & (behind < (keys if window is None else window))
    if not torch.equal(mask[0, 0].cpu() == 0, expected):
        raise ValueError(f"its mask is not that of a window of {window} tokens" if window else "its mask is not causal")
