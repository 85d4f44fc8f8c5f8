"""Llama and the families that differ from it in details. A new one is a line of `VARIANTS`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch
from app.gpu.models.base import require_fixed_rope
from app.gpu.models.elementwise import add_, add_rms_norm, rms_norm, rotate, silu_mul
from app.gpu.models.family import Elementwise, Family, Parts, activation_of, head_dim_of
from app.gpu.weights.bundles import Weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Variant:
    """What differs between families. Of the fields in which configs differ only those count that it `reads`, as in
    Transformers' module of that name; without `layer_types`, a window is that of all layers.
    """

    reads: tuple[str, ...]
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias whatever the config says."""
    qk_norm: bool = False
    """Whether each head of queries and keys is normed."""
    wide_qk_norm: bool = False
    """Whether all heads of queries are normed together, and those of keys."""
    norms_after: bool = False
    """Whether what attention and the MLP give is normed, not what they take."""
    fused: bool = False
    """Whether the checkpoint has one matrix for queries, keys and values, and one for gate and up."""


VARIANTS = {
    "llama": Variant(("attention_bias", "mlp_bias")),
    "mistral": Variant(("sliding_window",)),
    "qwen2": Variant(("layer_types",), qkv_bias=True),
    "qwen3": Variant(("attention_bias", "layer_types"), qk_norm=True),
    "smollm3": Variant(("attention_bias", "mlp_bias", "layer_types", "no_rope_layers")),
    "olmo2": Variant(("attention_bias",), wide_qk_norm=True, norms_after=True),
    "phi3": Variant(("sliding_window", "partial_rotary_factor"), fused=True),
}
"""By `model_type`."""


def rotary_table(config: PretrainedConfig, positions: int, weights: Weights) -> Tensor:
    """Cosines, then sines, of half a head each, `[positions, head_dim]`, for rotary position embedding (Su et al.,
    arXiv:2104.09864) with Transformers' own frequencies and scaling. Raises as `require_fixed_rope`,
    and for heads that are rotated in part.
    """
    require_fixed_rope(config)
    rotated = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if "partial_rotary_factor" in VARIANTS[config.model_type].reads and rotated != 1:
        raise FieldOutOfRange(f"partial_rotary_factor must be 1; {rotated} is not supported", param="model")
    kind, scale = config.rope_parameters["rope_type"], 1.0
    if kind == "default":
        width = head_dim_of(config)
        exponents = torch.arange(0, width, 2, dtype=torch.float) / width
        frequencies = 1.0 / (config.rope_parameters["rope_theta"] ** exponents)
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](cast("Any", config))
    device = weights.device
    angles = torch.arange(positions, device=device)[:, None].float() * frequencies.to(device, torch.float32)
    # Transformers' module of OLMo 2 rounds once it has rotated, the others round their angles.
    dtype = torch.float32 if config.model_type == "olmo2" else weights.dtype
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(dtype)


class LlamaLayer:
    """`h = x + attention(norm(x))`, then `h + mlp(norm(h))`, each sum in the tensor that the last projection has made;
    or `h = x + norm(attention(x))`, then `h + norm(mlp(h))`.

    Grouped-query attention with one projection to queries, keys and values, of which the first two are rotated
    together; the MLP is `down(activation(gate(x)) * up(x))`, gate and up in one projection.
    """

    def __init__(self, attention: Attention, table: Tensor | None, index: int, parts: Parts) -> None:
        """`table` is the `rotary_table`."""
        config, variant = parts.config, VARIANTS[parts.config.model_type]
        name, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
        heads, kv_heads, self._head_dim = config.num_attention_heads, config.num_key_value_heads, head_dim_of(config)
        self._heads, self._kv_heads = parts.shard.share(heads), parts.shard.share(kv_heads)
        self._eps = config.rms_norm_eps
        self._attention, self._spec = attention, AttentionSpec(self._head_dim**-0.5, _window(config, index))
        self._table = table if "no_rope_layers" not in variant.reads or config.no_rope_layers[index] else None
        self._activation = None if config.hidden_act == "silu" else activation_of(config.hidden_act)
        bias = "attention_bias" in variant.reads and config.attention_bias
        mlp_bias = "mlp_bias" in variant.reads and config.mlp_bias
        sizes = {"q": heads * self._head_dim, "k": kv_heads * self._head_dim, "v": kv_heads * self._head_dim}
        qkv = {f"{name}.self_attn.{each}_proj": [size] for each, size in sizes.items()}
        gate_up = {f"{name}.mlp.gate_proj": [inner], f"{name}.mlp.up_proj": [inner]}
        if variant.fused:
            qkv = {f"{name}.self_attn.qkv_proj": list(sizes.values())}
            gate_up = {f"{name}.mlp.gate_up_proj": [inner, inner]}
        self._norms_after, norms = variant.norms_after, ["input_layernorm", "post_attention_layernorm"]
        if variant.norms_after:
            norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
        self._attention_norm = parts.hold(f"{name}.{norms[0]}.weight", hidden)
        self._qkv = parts.cut(qkv, hidden, bias=bias or variant.qkv_bias)
        self._output = parts.summed(f"{name}.self_attn.o_proj", hidden, sizes["q"], bias=bias)
        self._qk_norm = parts.bundle.hold(self._take_qk_norm(f"{name}.self_attn", parts)) if variant.qk_norm else None
        wide = ("q", "k") if variant.wide_qk_norm else ()
        self._wide_norms = [parts.hold(f"{name}.self_attn.{each}_norm.weight", sizes[each]) for each in wide]
        self._mlp_norm = parts.hold(f"{name}.{norms[1]}.weight", hidden)
        self._gate_up = parts.cut(gate_up, hidden, bias=mlp_bias)
        self._down = parts.summed(f"{name}.mlp.down_proj", hidden, inner, bias=mlp_bias)

    def _take_qk_norm(self, name: str, parts: Parts) -> Tensor:
        """`[heads + kv_heads, head_dim]`: the weight of every query and key head's norm."""
        query = parts.source.take(f"{name}.q_norm.weight", (self._head_dim,)).expand(self._heads, -1)
        key = parts.source.take(f"{name}.k_norm.weight", (self._head_dim,)).expand(self._kv_heads, -1)
        return torch.cat((query, key))

    def __call__(self, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        if self._norms_after:
            attended = rms_norm(self._attend(hidden, batch, kv), self._attention_norm.tensor, self._eps)
            hidden = add_(attended, hidden)
            return add_(rms_norm(self._mlp(hidden), self._mlp_norm.tensor, self._eps), hidden)
        attended = self._attend(rms_norm(hidden, self._attention_norm.tensor, self._eps), batch, kv)
        hidden, normed = add_rms_norm(attended, hidden, self._mlp_norm.tensor, self._eps)
        return add_(self._mlp(normed), hidden)

    def _attend(self, normed: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        rotated = self._heads + self._kv_heads
        qkv = self._qkv(normed).view(-1, rotated + self._kv_heads, self._head_dim)
        qk, value = torch.split(qkv, [rotated, self._kv_heads], dim=1)
        if self._qk_norm is not None:
            qk = rms_norm(qk, self._qk_norm.tensor, self._eps)
        if not self._wide_norms:
            qk = self._rotate(qk, batch)
        query, key = torch.split(qk, [self._heads, self._kv_heads], dim=1)
        if self._wide_norms:
            query, key = (
                self._rotate(rms_norm(each.flatten(1), norm.tensor, self._eps).view(each.shape), batch)
                for each, norm in zip((query, key), self._wide_norms, strict=True)
            )
        attended = self._attention(query, key, value, kv, batch, self._spec)
        return self._output(attended.view(-1, self._heads * self._head_dim))

    def _rotate(self, heads: Tensor, batch: Batch) -> Tensor:
        return heads if self._table is None else rotate(heads, self._table, batch.positions)

    def _mlp(self, normed: Tensor) -> Tensor:
        gate_up = self._gate_up(normed)
        if self._activation is None:
            return self._down(silu_mul(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self._down(self._activation(gate).mul_(up))


def _window(config: PretrainedConfig, index: int) -> int | None:
    """How many keys a query of the layer sees; None: all."""
    reads = VARIANTS[config.model_type].reads
    in_layer = "layer_types" in reads and config.layer_types[index] == "sliding_attention"
    window: int | None = config.sliding_window if in_layer or "sliding_window" in reads else None
    return window


def _divided(config: PretrainedConfig) -> Sequence[int]:
    if VARIANTS[config.model_type].wide_qk_norm:
        return ()
    return config.num_attention_heads, config.num_key_value_heads, config.intermediate_size


def _norm(parts: Parts, name: str) -> Elementwise:
    """Root-mean-square norm over the last axis."""
    weight, eps = parts.hold(f"{name}.weight", parts.config.hidden_size), parts.config.rms_norm_eps
    return lambda x: rms_norm(x, weight.tensor, eps)


LLAMA = Family(
    layer=LlamaLayer,
    table=rotary_table,
    norm=_norm,
    tokens="model.embed_tokens.weight",
    final_norm="model.norm",
    divided=_divided,
    activation="hidden_act",
    own_activation="silu",
    window=_window,
    unused=re.compile(r"rotary_emb\.inv_freq$"),
)
