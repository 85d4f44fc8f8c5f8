"""One layer of a Llama-like model, with fused qkv and gate-up projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch
from app.gpu.kernels.linear.base import Linear
from app.gpu.kernels.linear.matrix import stack
from app.gpu.kernels.linear.shard import Shard
from app.gpu.models.elementwise import add_, add_rms_norm, rms_norm, silu_mul
from app.gpu.models.llama_variant import LlamaVariant
from app.gpu.models.rotary import Rotary
from app.gpu.weights.resident import Bundle
from app.gpu.weights.source import WeightSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class _SelfAttention:
    """Grouped-query attention with one projection to queries, keys and values; the first two are rotated together."""

    def __init__(
        self,
        index: int,
        config: PretrainedConfig,
        variant: LlamaVariant,
        source: WeightSource,
        rotary: Rotary,
        attention: Attention,
        bundle: Bundle,
        shard: Shard,
    ) -> None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._heads, self._kv_heads = shard.share(heads), shard.share(kv_heads)
        self._head_dim = variant.head_dim
        self._eps = config.rms_norm_eps
        self._rotary = rotary if variant.rotary_layers[index] else None
        self._attention = attention
        self._spec = AttentionSpec(scale=self._head_dim**-0.5, window=variant.windows[index])
        name, hidden = f"model.layers.{index}.self_attn", config.hidden_size
        width, kv_width = heads * self._head_dim, kv_heads * self._head_dim
        parts = {f"{name}.q_proj": width, f"{name}.k_proj": kv_width, f"{name}.v_proj": kv_width}
        self._qkv = _fused(source, parts, hidden, variant.qkv_bias, bundle, shard)
        self._output = _summed(source, f"{name}.o_proj", hidden, width, variant.output_bias, bundle, shard)
        self._qk_norm = bundle.hold(self._take_qk_norm(name, source)) if variant.qk_norm else None

    def _take_qk_norm(self, name: str, source: WeightSource) -> Tensor:
        """`[heads + kv_heads, head_dim]`: the weight of every query and key head's norm."""
        query = source.take(f"{name}.q_norm.weight", (self._head_dim,)).expand(self._heads, -1)
        key = source.take(f"{name}.k_norm.weight", (self._head_dim,)).expand(self._kv_heads, -1)
        return torch.cat((query, key))

    def __call__(self, normed: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        """`[tokens, hidden]` to the same shape; `kv` as in `LayerStack.layer`."""
        rotated = self._heads + self._kv_heads
        qkv = self._qkv(normed).view(-1, rotated + self._kv_heads, self._head_dim)
        qk, value = torch.split(qkv, [rotated, self._kv_heads], dim=1)
        if self._qk_norm is not None:
            qk = rms_norm(qk, self._qk_norm.tensor, self._eps)
        if self._rotary is not None:
            qk = self._rotary(qk, batch.positions)
        query, key = torch.split(qk, [self._heads, self._kv_heads], dim=1)
        attended = self._attention(query, key, value, kv, batch, self._spec)
        return self._output(attended.view(-1, self._heads * self._head_dim))


class _Mlp:
    """`down(activation(gate(x)) * up(x))`, gate and up in one projection."""

    def __init__(
        self,
        index: int,
        config: PretrainedConfig,
        variant: LlamaVariant,
        source: WeightSource,
        bundle: Bundle,
        shard: Shard,
    ) -> None:
        name, hidden, inner = f"model.layers.{index}.mlp", config.hidden_size, config.intermediate_size
        self._activation = None if config.hidden_act == "silu" else _activation(config.hidden_act)
        gate_up = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
        self._gate_up = _fused(source, gate_up, hidden, variant.mlp_bias, bundle, shard)
        self._down = _summed(source, f"{name}.down_proj", hidden, inner, variant.mlp_bias, bundle, shard)

    def __call__(self, normed: Tensor) -> Tensor:
        """`[tokens, hidden]` to the same shape."""
        gate_up = self._gate_up(normed)
        if self._activation is None:
            return self._down(silu_mul(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self._down(self._activation(gate).mul_(up))


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    from transformers.activations import ACT2FN  # imports much of Transformers

    activation: Callable[[Tensor], Tensor] = ACT2FN[name]
    return activation


def _fused(
    source: WeightSource, parts: dict[str, int], inputs: int, bias: bool, bundle: Bundle, shard: Shard
) -> Linear:
    """One layer over the stacked rows of `parts`: module name to output features. Of each the shard has its share."""
    weight = stack([shard.rows(source.take_matrix(f"{name}.weight", (rows, inputs))) for name, rows in parts.items()])
    if not bias:
        return bundle.linear(weight)
    taken = [shard.values(source.take(f"{name}.bias", (rows,))) for name, rows in parts.items()]
    return bundle.linear(weight, torch.cat(taken))


def _summed(
    source: WeightSource, name: str, rows: int, inputs: int, bias: bool, bundle: Bundle, shard: Shard
) -> Linear:
    """The layer that takes what each shard has of `inputs`."""
    weight = shard.columns(source.take_matrix(f"{name}.weight", (rows, inputs)))
    taken = shard.once(source.take(f"{name}.bias", (rows,))) if bias else None
    return shard.summed(bundle.linear(weight, taken))


class RmsNorm:
    """Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467) over the last axis."""

    def __init__(self, name: str, config: PretrainedConfig, source: WeightSource, bundle: Bundle) -> None:
        self._eps = config.rms_norm_eps
        self._weight = bundle.hold(source.take(f"{name}.weight", (config.hidden_size,)))

    def __call__(self, x: Tensor) -> Tensor:
        """`[tokens, hidden]` to the same shape."""
        return rms_norm(x, self._weight.tensor, self._eps)

    def of_sum(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """`x`, to which `other` has been added, and the norm of that."""
        return add_rms_norm(x, other, self._weight.tensor, self._eps)


class LlamaLayer:
    """`h = x + attention(norm(x))`, then `h + mlp(norm(h))`."""

    def __init__(
        self,
        index: int,
        config: PretrainedConfig,
        variant: LlamaVariant,
        source: WeightSource,
        rotary: Rotary,
        attention: Attention,
        bundle: Bundle,
        shard: Shard,
    ) -> None:
        name = f"model.layers.{index}"
        self._input_norm = RmsNorm(f"{name}.input_layernorm", config, source, bundle)
        self._attention = _SelfAttention(index, config, variant, source, rotary, attention, bundle, shard)
        self._mlp_norm = RmsNorm(f"{name}.post_attention_layernorm", config, source, bundle)
        self._mlp = _Mlp(index, config, variant, source, bundle, shard)

    def __call__(self, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        """See `LayerStack.layer`. Each sum goes into the tensor that the projection has just made."""
        attended = self._attention(self._input_norm(hidden), batch, kv)
        hidden, normed = self._mlp_norm.of_sum(attended, hidden)
        return add_(self._mlp(normed), hidden)
