"""GPT-2: learned positions, LayerNorm, fused qkv as the checkpoint has it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch
from app.gpu.kernels.linear.base import Linear
from app.gpu.kernels.linear.matrix import dense_of
from app.gpu.kernels.linear.shard import WHOLE, Shard
from app.gpu.models.elementwise import add_, gelu_, layer_norm
from app.gpu.models.head import Head
from app.gpu.weights.resident import Bundle, Weights
from app.gpu.weights.source import WeightSource, take_output_weight

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Old checkpoints store the causal mask.
_NOT_NEEDED = re.compile(r"\.attn\.(masked_)?bias$")


class _Norm:
    """LayerNorm with weight and bias over the last axis."""

    def __init__(self, name: str, config: PretrainedConfig, source: WeightSource, bundle: Bundle) -> None:
        self._eps = config.layer_norm_epsilon
        self._weight = bundle.hold(source.take(f"{name}.weight", (config.hidden_size,)))
        self._bias = bundle.hold(source.take(f"{name}.bias", (config.hidden_size,)))

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self._weight.tensor, self._bias.tensor, self._eps)


class _Gpt2Layer:
    """One layer: `h = x + attention(norm(x))`, then `h + mlp(norm(h))`."""

    def __init__(
        self,
        index: int,
        config: PretrainedConfig,
        source: WeightSource,
        attention: Attention,
        bundle: Bundle,
        shard: Shard,
    ) -> None:
        name, hidden = f"transformer.h.{index}", config.hidden_size
        inner = config.n_inner or 4 * hidden
        self._heads = shard.share(config.num_attention_heads)
        self._attention = attention
        self._spec = AttentionSpec(scale=_scale(index, config))
        self._activation = _activation(config.activation_function)
        self._input_norm = _Norm(f"{name}.ln_1", config, source, bundle)
        self._qkv = _cut(source, f"{name}.attn.c_attn", hidden, 3 * hidden, bundle, shard, parts=3)
        self._output = _summed(source, f"{name}.attn.c_proj", hidden, hidden, bundle, shard)
        self._mlp_norm = _Norm(f"{name}.ln_2", config, source, bundle)
        self._up = _cut(source, f"{name}.mlp.c_fc", hidden, inner, bundle, shard)
        self._down = _summed(source, f"{name}.mlp.c_proj", inner, hidden, bundle, shard)

    def __call__(self, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        """See `LayerStack.layer`."""
        qkv = self._qkv(self._input_norm(hidden))
        query, key, value = qkv.view(hidden.shape[0], 3, self._heads, -1).unbind(1)
        attended = self._attention(query, key, value, kv, batch, self._spec)
        hidden = add_(self._output(attended.view(hidden.shape[0], -1)), hidden)
        return add_(self._down(self._activation(self._up(self._mlp_norm(hidden)))), hidden)


def _cut(
    source: WeightSource, name: str, inputs: int, outputs: int, bundle: Bundle, shard: Shard, parts: int = 1
) -> Linear:
    """The layer with the shard's share of each of the `parts` that its output features are made of."""
    weight = shard.rows(_conv1d(source, name, inputs, outputs), parts)
    return bundle.linear(weight, shard.values(source.take(f"{name}.bias", (outputs,)), parts))


def _summed(source: WeightSource, name: str, inputs: int, outputs: int, bundle: Bundle, shard: Shard) -> Linear:
    """The layer that takes what each shard has of `inputs`."""
    weight = shard.columns(_conv1d(source, name, inputs, outputs))
    return shard.summed(bundle.linear(weight, shard.once(source.take(f"{name}.bias", (outputs,)))))


def _conv1d(source: WeightSource, name: str, inputs: int, outputs: int) -> Tensor:
    """GPT-2 stores `[in, out]` (Transformers' `Conv1D`): here `[out, in]`."""
    return dense_of(source.take_matrix(f"{name}.weight", (inputs, outputs))).t().contiguous()


def _scale(index: int, config: PretrainedConfig) -> float:
    head_dim = config.hidden_size // config.num_attention_heads
    scale = float(head_dim**-0.5) if config.scale_attn_weights else 1.0
    return scale / (index + 1) if config.scale_attn_by_inverse_layer_idx else scale


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name == "gelu_new":
        return gelu_
    from transformers.activations import ACT2FN  # imports much of Transformers

    activation: Callable[[Tensor], Tensor] = ACT2FN[name]
    return activation


class Gpt2Stack:
    """A `LayerStack` for `gpt2`."""

    def __init__(
        self,
        config: PretrainedConfig,
        source: WeightSource,
        attention: Attention,
        max_model_len: int,
        weights: Weights,
        shard: Shard = WHOLE,
    ) -> None:
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.kv_heads: int = shard.share(config.num_attention_heads)
        self.head_dim = self.hidden_size // config.num_attention_heads
        self.max_model_len = max_model_len
        self.dtype, self.device = weights.dtype, weights.device
        self._weights = weights
        self._layers = []
        for index in range(self.num_layers):
            with weights.bundle() as bundle:
                self._layers.append(_Gpt2Layer(index, config, source, attention, bundle, shard))
        layer_bytes = source.nbytes // self.num_layers
        positions = source.take_matrix("transformer.wpe.weight", (config.max_position_embeddings, self.hidden_size))
        self._positions = weights.table(positions)
        tokens = source.take_matrix("transformer.wte.weight", (self.vocab_size, self.hidden_size))
        self._tokens = weights.table(tokens)
        with weights.bundle() as bundle:
            norm = _Norm("transformer.ln_f", config, source, bundle)
        output = take_output_weight(source, config, tokens)
        self._head = Head(norm, output, layer_bytes, weights, self.num_layers, shard)
        source.finish(_NOT_NEEDED)
        self.parameter_bytes = source.nbytes

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return self._tokens(token_ids).add_(self._positions(positions))

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        with self._weights.using(index):
            return self._layers[index](hidden, batch, kv)

    def head(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)
