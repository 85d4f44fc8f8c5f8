"""GPT-2: learned positions, LayerNorm, fused qkv as the checkpoint has it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from app.domain.points import Point, PointShape
from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch, tapped
from app.gpu.models.elementwise import add_, gelu_, layer_norm
from app.gpu.models.family import (
    Elementwise,
    Family,
    Layer,
    Parts,
    Writer,
    activation_of,
    attention_points,
    head_dim_of,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _norm(parts: Parts, name: str) -> Elementwise:
    """LayerNorm with weight and bias over the last axis."""
    weight, bias = (parts.hold(f"{name}.{each}", parts.config.hidden_size) for each in ("weight", "bias"))
    eps = parts.config.layer_norm_epsilon
    return lambda x: layer_norm(x, weight.tensor, bias.tensor, eps)


def _layer(attention: Attention, _tables: None, index: int, parts: Parts) -> Layer:
    """One layer: `h = x + attention(norm(x))`, then `h + mlp(norm(h))`."""
    config, name = parts.config, f"transformer.h.{index}"
    hidden_size, inner, heads = config.hidden_size, _inner(config), parts.shard.share(config.num_attention_heads)
    scale = float(head_dim_of(config) ** -0.5) if config.scale_attn_weights else 1.0
    spec = AttentionSpec(scale / (index + 1) if config.scale_attn_by_inverse_layer_idx else scale)
    activation = gelu_ if config.activation_function == "gelu_new" else activation_of(config.activation_function)
    input_norm = _norm(parts, f"{name}.ln_1")
    to_qkv = parts.cut({f"{name}.attn.c_attn": [hidden_size] * 3}, hidden_size, bias=True)
    output = parts.summed(f"{name}.attn.c_proj", hidden_size, hidden_size, bias=True)
    mlp_norm = _norm(parts, f"{name}.ln_2")
    up = parts.cut({f"{name}.mlp.c_fc": [inner]}, hidden_size, bias=True)
    down = parts.summed(f"{name}.mlp.c_proj", hidden_size, inner, bias=True)

    parts.writers.update({Point.Z: Writer(output, 1.0), Point.MLP_POST: Writer(down, 1.0)})

    def layer(hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        tap = batch.taps or _untapped
        normed = input_norm(hidden)
        tap(Point.ATTN_IN, normed)
        query, key, value = to_qkv(normed).view(hidden.shape[0], 3, heads, -1).unbind(1)
        tap(Point.Q, query)
        tap(Point.K, key)
        attended = output(tapped(attention, query, key, value, kv, batch, spec).view(hidden.shape[0], -1))
        tap(Point.ATTN_OUT, attended)
        hidden = add_(attended, hidden)
        tap(Point.RESID_MID, hidden)
        normed = mlp_norm(hidden)
        tap(Point.MLP_IN, normed)
        neurons = up(normed)
        tap(Point.MLP_PRE, neurons)
        neurons = activation(neurons)
        tap(Point.MLP_POST, neurons)
        added = down(neurons)
        tap(Point.MLP_OUT, added)
        return add_(added, hidden)

    return layer


def _untapped(_point: Point, _x: Tensor) -> None:
    """Nothing is to be done."""


def _points(config: PretrainedConfig, _index: int) -> Mapping[Point, PointShape]:
    """Of a layer. Positions are in the embeddings: nothing is rotated."""
    heads = config.num_attention_heads
    inside = attention_points(heads, heads, head_dim_of(config))
    del inside[Point.Q_ROT], inside[Point.K_ROT]
    stream = Point.ATTN_IN, Point.ATTN_OUT, Point.RESID_MID, Point.MLP_IN, Point.MLP_OUT
    inside |= dict.fromkeys(stream, PointShape(config.hidden_size))
    return inside | dict.fromkeys((Point.MLP_PRE, Point.MLP_POST), PointShape(_inner(config)))


def _inner(config: PretrainedConfig) -> int:
    """The MLP's width."""
    width: int = config.n_inner or 4 * config.hidden_size
    return width


GPT2 = Family(
    layer=_layer,
    norm=_norm,
    tokens="transformer.wte.weight",
    positions="transformer.wpe.weight",
    final_norm="transformer.ln_f",
    divided=lambda config: (config.num_attention_heads, _inner(config)),
    activation=lambda config: config.activation_function,
    points=_points,
    own_activations=frozenset({"gelu_new"}),
    turned=True,
    unused=lambda config: re.compile(r"\.attn\.(masked_)?bias$"),  # the causal mask
)
