"""Llama and the families that differ from it in details: Mistral, Qwen2, Qwen3, SmolLM, TinyLlama."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import Tensor

from app.gpu.kernels.attention.base import Attention, Batch
from app.gpu.kernels.linear.shard import WHOLE, Shard
from app.gpu.models.head import Head
from app.gpu.models.llama_layer import LlamaLayer, RmsNorm
from app.gpu.models.llama_variant import variant_of
from app.gpu.models.rotary import Rotary
from app.gpu.weights.resident import Weights
from app.gpu.weights.source import WeightSource, take_output_weight

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Old checkpoints store the rotary frequencies.
_NOT_NEEDED = re.compile(r"rotary_emb\.inv_freq$")


class LlamaStack:
    """A `LayerStack` for `llama`, `mistral`, `qwen2`, `qwen3` and `smollm3`."""

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
        self.kv_heads: int = shard.share(config.num_key_value_heads)
        variant = variant_of(config)
        self.head_dim = variant.head_dim
        self.max_model_len = max_model_len
        self.dtype, self.device = weights.dtype, weights.device
        self._weights = weights
        rotary = Rotary(config, max_model_len, self.device, self.dtype)
        self._layers = []
        for index in range(self.num_layers):
            with weights.bundle() as bundle:
                self._layers.append(LlamaLayer(index, config, variant, source, rotary, attention, bundle, shard))
        layer_bytes = source.nbytes // self.num_layers
        embedding = source.take_matrix("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))
        self._embedding = weights.table(embedding)
        with weights.bundle() as bundle:
            norm = RmsNorm("model.norm", config, source, bundle)
        output = take_output_weight(source, config, embedding)
        self._head = Head(norm, output, layer_bytes, weights, self.num_layers, shard)
        source.finish(_NOT_NEEDED)
        self.parameter_bytes = source.nbytes

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return self._embedding(token_ids)

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        with self._weights.using(index):
            return self._layers[index](hidden, batch, kv)

    def head(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)
