"""GPT-2: learned positions, LayerNorm, fused qkv as the checkpoint has it."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch
from app.gpu.models.elementwise import add_, gelu_, layer_norm
from app.gpu.models.family import Elementwise, Family, Parts, activation_of, head_dim_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _norm(parts: Parts, name: str) -> Elementwise:
    """LayerNorm with weight and bias over the last axis."""
    weight, bias = (parts.hold(f"{name}.{each}", parts.config.hidden_size) for each in ("weight", "bias"))
    eps = parts.config.layer_norm_epsilon
    return lambda x: layer_norm(x, weight.tensor, bias.tensor, eps)


class _Gpt2Layer:
    """One layer: `h = x + attention(norm(x))`, then `h + mlp(norm(h))`."""

    def __init__(self, attention: Attention, index: int, parts: Parts) -> None:
        config, name = parts.config, f"transformer.h.{index}"
        hidden, inner = config.hidden_size, _inner(config)
        self._heads = parts.shard.share(config.num_attention_heads)
        self._attention = attention
        scale = float(head_dim_of(config) ** -0.5) if config.scale_attn_weights else 1.0
        self._spec = AttentionSpec(scale / (index + 1) if config.scale_attn_by_inverse_layer_idx else scale)
        self._activation = (
            gelu_ if config.activation_function == "gelu_new" else activation_of(config.activation_function)
        )
        self._input_norm = _norm(parts, f"{name}.ln_1")
        self._qkv = parts.cut({f"{name}.attn.c_attn": [hidden] * 3}, hidden, bias=True)
        self._output = parts.summed(f"{name}.attn.c_proj", hidden, hidden, bias=True)
        self._mlp_norm = _norm(parts, f"{name}.ln_2")
        self._up = parts.cut({f"{name}.mlp.c_fc": [inner]}, hidden, bias=True)
        self._down = parts.summed(f"{name}.mlp.c_proj", hidden, inner, bias=True)

    def __call__(self, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        qkv = self._qkv(self._input_norm(hidden))
        query, key, value = qkv.view(hidden.shape[0], 3, self._heads, -1).unbind(1)
        attended = self._attention(query, key, value, kv, batch, self._spec)
        hidden = add_(self._output(attended.view(hidden.shape[0], -1)), hidden)
        return add_(self._down(self._activation(self._up(self._mlp_norm(hidden)))), hidden)


def _inner(config: PretrainedConfig) -> int:
    """The MLP's width."""
    width: int = config.n_inner or 4 * config.hidden_size
    return width


GPT2 = Family(
    layers=lambda config, attention, max_model_len, weights: partial(_Gpt2Layer, attention),
    norm=_norm,
    tokens="transformer.wte.weight",
    positions="transformer.wpe.weight",
    final_norm="transformer.ln_f",
    divided=lambda config: (config.num_attention_heads, _inner(config)),
    activation="activation_function",
    own_activation="gelu_new",
    turned=True,
    unused=re.compile(r"\.attn\.(masked_)?bias$"),  # the causal mask
)
