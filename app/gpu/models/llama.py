"""Llama and the families that differ from it in details: Mistral, Qwen2, Qwen3, SmolLM, TinyLlama."""

from __future__ import annotations

import re

import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from app.gpu.attention.base import Attention
from app.gpu.batch import Batch
from app.gpu.linear import MakeLinear
from app.gpu.models.llama_layer import LlamaLayer, RmsNorm
from app.gpu.models.llama_variant import variant_of
from app.gpu.models.rotary import Rotary
from app.gpu.weights import WeightSource, take_output_weight

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
        linear: MakeLinear,
    ) -> None:
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.kv_heads: int = config.num_key_value_heads
        variant = variant_of(config)
        self.head_dim = variant.head_dim
        self.max_model_len = max_model_len
        self._embedding = source.take("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        rotary = Rotary(config, max_model_len, self.device, self.dtype)
        self._layers = [
            LlamaLayer(i, config, variant, source, rotary, attention, linear) for i in range(self.num_layers)
        ]
        self._norm = RmsNorm("model.norm", config, source)
        self._lm_head = linear(take_output_weight(source, config, self._embedding))
        source.finish(_NOT_NEEDED)
        self.parameter_bytes = source.nbytes

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """See `LayerStack.embed`."""
        return F.embedding(token_ids, self._embedding)

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        """See `LayerStack.layer`."""
        return self._layers[index](hidden, batch, kv)

    def head(self, hidden: Tensor) -> Tensor:
        """See `LayerStack.head`."""
        return self._lm_head(self._norm(hidden)).float()
