"""Multi-head latent attention (DeepSeek-AI, arXiv:2405.04434): all heads attend over one latent of each token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from app.domain.points import Point, PointShape
from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch
from app.gpu.kernels.linear.base import Linear, dense_of, split, stack
from app.gpu.models.elementwise import rms_norm, rotate
from app.gpu.models.parts import Parts
from app.model_store.saved import Config

_EPS = 1e-6
"""Of the norms of latents, whatever the config says of others."""
_HEADS_AT_ONCE = 16
"""Heads that a kernel takes together: more would overfill the registers of a GPU, and leave a CPU's cores idle."""


class LatentAttention:
    """A token's key is what is rotated, then its latent; so is its value, of which the latent counts. A query's product
    with the matrix that makes keys of latents is its product with these keys ("absorbed"), and values are made of the
    latent that a head attends to. So the pool keeps latents, not the keys and values of all heads.
    """

    def __init__(self, attention: Attention, table: Tensor, parts: Parts, module: str, *, interleaved: bool) -> None:
        """`table` is that of `rotary_tables`; `interleaved` says whether the numbers that are rotated together are
        neighbours in the checkpoint.
        """
        config, hidden, bias = parts.config, parts.config.hidden_size, parts.config.attention_bias
        heads, self._rank, self._rotated = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
        self._heads, self._plain, self._values = heads, config.qk_nope_head_dim, config.v_head_dim
        self._attention, self._table, self._spec = attention, table, AttentionSpec(_scale(config))
        pairs = torch.arange(self._rotated)
        pairs = pairs.view(-1, 2).T.flatten() if interleaved else pairs
        head = torch.cat((self._plain + pairs, torch.arange(self._plain)))  # what is rotated comes first
        self._order, width = head.argsort().to(parts.device), self._plain + self._rotated
        queries = (torch.arange(heads)[:, None] * width + head).flatten()
        keys = torch.cat((self._rank + pairs, torch.arange(self._rank)))
        self._query_norm, inward = None, f"{module}.kv_a_proj_with_mqa"
        inputs, orders, query, inner = {inward: [len(keys)]}, {inward: keys}, f"{module}.q_proj", hidden
        if config.q_lora_rank is not None:
            query, inner = f"{module}.q_b_proj", config.q_lora_rank
            inputs = {f"{module}.q_a_proj": [inner], **inputs}
            self._query_norm = parts.hold(f"{module}.q_a_layernorm.weight", inner)
        self._inward = parts.cut(inputs, hidden, bias=bias, orders=orders)
        self._query = parts.cut({query: [heads * width]}, inner, bias=False, orders={query: queries})
        self._norm = parts.hold(f"{module}.kv_a_layernorm.weight", self._rank)
        both = parts.source.take_matrix(
            f"{module}.kv_b_proj.weight", (heads * (self._plain + self._values), self._rank)
        )
        each = split(both, [self._plain, self._values] * heads)
        absorbed = dense_of(stack(each[::2])).view(heads, self._plain, self._rank)
        self._absorb = parts.bundle.linear(absorbed.transpose(1, 2).reshape(-1, self._plain), None, heads)
        self._raise = parts.bundle.linear(stack(each[1::2]), None, heads)
        self._output = parts.part_of_sum(f"{module}.o_proj", hidden, heads * self._values, bias=bias)
        parts.writers[Point.Z] = self._output, 1.0, None

    @staticmethod
    def kv_width(config: Config) -> int:
        """Numbers of a key."""
        width: int = config.qk_rope_head_dim + config.kv_lora_rank
        return width

    @staticmethod
    def points(config: Config) -> dict[Point, PointShape]:
        """Those inside it."""
        heads = config.num_attention_heads
        queries = PointShape(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), heads)
        values = PointShape(heads * config.v_head_dim, heads)
        return {Point.Q: queries, Point.PATTERN: PointShape(heads, heads), Point.Z: values}

    def __call__(self, normed: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        taps, tokens, inward = batch.taps, len(normed), self._inward(normed)
        latent, start = inward[:, -self._rank :], inward.shape[1] - self._rank - self._rotated
        if self._query_norm is not None:
            normed = rms_norm(inward[:, :start], self._query_norm.tensor, _EPS)
        query = self._query(normed).view(tokens, self._heads, -1)
        if taps is not None:
            taps(Point.Q, query, self._order)
        query = rotate(query, self._table, batch.positions)
        turned = rotate(inward[:, None, start : -self._rank], self._table, batch.positions)
        key = torch.cat((turned, rms_norm(latent, self._norm.tensor, _EPS)[:, None]), dim=2)
        wide = self._of_heads(self._absorb, query[:, :, self._rotated :])
        query = torch.cat((query[:, :, : self._rotated], wide), dim=2)
        copies = -(-self._heads // _HEADS_AT_ONCE)
        copies = copies if self._heads % copies == 0 else 1
        key, shared = key.expand(-1, copies, -1), kv.expand(-1, -1, copies, -1, -1)
        attended = self._attention(query, key, key, shared, batch, self._spec)
        if taps is not None:
            taps.pattern(query, kv, batch, self._spec)
        mixed = self._of_heads(self._raise, attended[:, :, self._rotated :]).contiguous()
        if taps is not None:
            taps(Point.Z, mixed)
        return self._output(mixed.flatten(1))

    def _of_heads(self, linear: Linear, x: Tensor) -> Tensor:
        """The products of `x` `[tokens, heads, in]` with the matrix of each head, `[tokens, heads, out]`."""
        starts = torch.arange(self._heads + 1, dtype=torch.int32, device=x.device) * len(x)
        return linear(x.transpose(0, 1).contiguous(), starts).transpose(0, 1)


def _scale(config: Config) -> float:
    """Of scores, which a longer rotation sharpens (Peng et al., arXiv:2309.00071)."""
    scale, rope = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5), config.rope_parameters
    sharper = rope.get("mscale_all_dim", 0) if rope["rope_type"] != "default" else 0
    if sharper and rope["factor"] > 1:
        scale *= (0.1 * sharper * math.log(rope["factor"]) + 1.0) ** 2
    return scale
