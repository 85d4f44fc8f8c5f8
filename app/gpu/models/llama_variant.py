"""What sets one Llama-like family apart from another, read off the Transformers configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_READS_ATTENTION_BIAS = {"llama", "qwen3", "smollm3"}
_READS_MLP_BIAS = {"llama", "smollm3"}
_READS_LAYER_TYPES = {"qwen2", "qwen3", "smollm3"}


@dataclass(frozen=True, slots=True)
class LlamaVariant:
    """`windows` and `rotary_layers` have one entry per layer; a window of None sees every key."""

    head_dim: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rotary_layers: tuple[bool, ...]


def variant_of(config: PretrainedConfig) -> LlamaVariant:
    """The variant of `config.model_type`: the same fields count as in Transformers' module of that name, no others."""
    family = config.model_type
    attention_bias = family in _READS_ATTENTION_BIAS and config.attention_bias
    layers = config.num_hidden_layers
    rotary = config.no_rope_layers if family == "smollm3" else [True] * layers
    return LlamaVariant(
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=family in _READS_MLP_BIAS and config.mlp_bias,
        qk_norm=family == "qwen3",
        windows=tuple(_window(config, index) for index in range(layers)),
        rotary_layers=tuple(map(bool, rotary)),
    )


def _window(config: PretrainedConfig, index: int) -> int | None:
    sliding = config.model_type == "mistral" or (
        config.model_type in _READS_LAYER_TYPES and config.layer_types[index] == "sliding_attention"
    )
    window: int | None = config.sliding_window if sliding else None
    return window
