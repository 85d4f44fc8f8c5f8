"""A model on layers of ours. Its bundles of weights are layers, the final norm, and chunks of the output projection.

That is a model's largest matrix, often larger than a layer: in chunks it does not decide how much of a device a model
takes whose weights are streamed. Chunks follow from the model's shape and types, so that logits are the same wherever
its weights are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from app.domain.points import Point, Points, around_layers
from app.gpu.kernels.attention.base import Attention, Batch
from app.gpu.kernels.linear.base import WHOLE, Linear, Matrix, Shard, split, stored_rows
from app.gpu.models.adapters import Sites
from app.gpu.models.base import finish
from app.gpu.models.elementwise import softcap_
from app.gpu.models.layers import (
    Norm,
    attends,
    decoder_layer,
    embedding_scale,
    folded_bytes,
    kv_shape,
    points_inside,
    rotary_tables,
    window_of,
)
from app.gpu.models.parts import Layer, Parts, Writer
from app.gpu.models.variants import VARIANTS, read
from app.gpu.state.checkpoints import InParts
from app.gpu.state.layer_state import FoldState, LayerState, attention_state, state_bytes
from app.gpu.weights.bundles import ResidentWeights, Weights
from app.gpu.weights.source import WeightSource, take_output_weight
from app.model_store.saved import Config

_TILE = 64
"""A chunk has a multiple of this many rows: whole tiles of a library's products."""


class OwnStack:
    """A `LayerStack` of a family in `VARIANTS`."""

    def __init__(
        self,
        config: Config,
        source: WeightSource,
        attention: Attention,
        max_model_len: int,
        weights: Weights,
        shard: Shard = WHOLE,
    ) -> None:
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        variant, (kv_heads, self.head_dim) = VARIANTS[config.model_type], kv_shape(config)
        self.kv_heads = shard.share(kv_heads)
        self.dtype, self.device = weights.dtype, weights.device
        states = [self._state(config, index) for index in range(self.num_layers)]
        self.states: Sequence[LayerState] = states
        self.max_model_len = max_model_len
        self._weights, self._shard, self.sites = weights, shard, Sites()
        self.head_in_parts = self._head_in_parts if isinstance(weights, ResidentWeights) else None
        tables = rotary_tables(config, max_model_len, weights)
        made = partial(Parts, config, source, shard, self.device, self.dtype, variant.turned, self.sites)
        self._layers, self._writers = list[Layer](), list[Mapping[Point, Writer]]()
        for index in range(self.num_layers):
            with weights.bundle() as bundle:
                parts = made(bundle, state_bytes(states[:index]))
                self._layers.append(decoder_layer(attention, tables, index, parts))
                state = states[index]
                if isinstance(state, FoldState):
                    states[index] = replace(state, fits=parts.state_fits)
                self._writers.append(parts.writers)
        layer_bytes = source.nbytes // self.num_layers
        self._positions = None
        if variant.positions is not None:
            shape = (config.max_position_embeddings, self.hidden_size)
            self._positions = weights.table(source.take_matrix(variant.positions, shape))
        tokens = source.take_matrix(variant.tokens, (self.vocab_size, self.hidden_size))
        self._tokens = weights.table(tokens)
        with weights.bundle() as bundle:
            self._norm = Norm(made(bundle), variant.final_norm)
        self._output = self._chunk(take_output_weight(source, config, tokens), layer_bytes)
        source.finish(_unused(config))
        self._embedding_scale = embedding_scale(config, self.dtype)
        self.points = (
            points_of(config) if shard.ranks == 1 else around_layers(self.num_layers, self.hidden_size, self.vocab_size)
        )
        self._logit_scale: float = read(config, "lm_head_multiplier", 1 / read(config, "logits_scaling", 1.0))
        self._logit_cap: float | None = read(config, "final_logit_softcapping")
        self.parameter_bytes = source.nbytes

    def _state(self, config: Config, index: int) -> LayerState:
        folded, attention = folded_bytes(config, index, self.dtype), None
        if attends(config, index):
            attention = attention_state(self.kv_heads, self.head_dim, window_of(config, index))
        return attention if attention is not None and not folded else FoldState(folded, attention)

    def _chunk(self, weight: Matrix, layer_bytes: int) -> list[Linear]:
        """The shard's rows of an output projection `[vocab, hidden]`, in chunks. Each has at most as many bytes as a
        layer, which has `layer_bytes` in the types of the checkpoint, but not less than 64 rows.
        """
        row_bytes, chunks = stored_rows(weight).nbytes // weight.shape[0], list[Linear]()
        for rows in split(self._shard.vocabulary(weight), max(_TILE, layer_bytes // row_bytes // _TILE * _TILE)):
            with self._weights.bundle() as bundle:
                chunks.append(bundle.linear(rows))
        return chunks

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        embedded = self._tokens(token_ids)
        if self._embedding_scale != 1:
            embedded = embedded.mul_(self._embedding_scale)
        return embedded if self._positions is None else embedded.add_(self._positions(positions))

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        self.sites.rows = batch.adapters
        with self._weights.using(index):
            return self._layers[index](hidden, batch, kv)

    def normed(self, hidden: Tensor) -> Tensor:
        with self._weights.using(self.num_layers):
            return self._norm(hidden)

    def head(self, hidden: Tensor) -> Tensor:
        return self.unembed(self.normed(hidden))

    def _head_in_parts(self, hidden: Tensor) -> InParts[Tensor]:
        return self._unembed_in_parts(self.normed(hidden))

    def unembed(self, normed: Tensor) -> Tensor:
        return finish(self._unembed_in_parts(normed))

    def _unembed_in_parts(self, normed: Tensor) -> InParts[Tensor]:
        width, end = sum(chunk.out_features for chunk in self._output), 0
        logits = torch.empty(normed.shape[0], width, dtype=torch.float32, device=normed.device)
        for index, chunk in enumerate(self._output, self.num_layers + 1):
            begin, end = end, end + chunk.out_features
            with self._weights.using(index):
                logits[:, begin:end] = chunk(normed)
            yield None
        if self._logit_scale != 1:
            logits.mul_(self._logit_scale)
        if self._logit_cap is not None:
            softcap_(logits, self._logit_cap)
        return self._shard.beside(logits, self.vocab_size)

    def toward(self, token_id: int) -> InParts[Tensor]:
        each, begin, found = torch.eye(self.hidden_size, dtype=self.dtype, device=self.device), 0, list[Tensor]()
        for index, chunk in enumerate(self._output, self.num_layers + 1):
            if begin <= token_id < begin + chunk.out_features:
                for rows in each.split(self.hidden_size if self.head_in_parts is None else 8):
                    with self._weights.using(index):
                        found.append(chunk(rows)[:, token_id - begin])
                    yield None
            begin += chunk.out_features
        return torch.cat(found).float() * self._logit_scale

    def written(
        self, index: int, point: Point, parts: Tensor, whole: Tensor, adapters: Sequence[tuple[Any, Any]]
    ) -> Tensor | None:
        if point not in self._writers[index]:
            return None
        (linear, scale, norm), self.sites.rows = self._writers[index][point], adapters
        with self._weights.using(index):
            made = linear(torch.cat((parts, whole[None]))).float()
            if norm is not None:
                weight, eps = norm
                made *= weight.tensor.float() * torch.rsqrt(made[-1].square().mean() + eps)
            return made[:-1] * scale


def _unused(config: Config) -> re.Pattern[str]:
    """Tensors of checkpoints that nothing needs: frequencies and masks in old ones, and what predicts a second token:
    layers behind the last one, or others.
    """
    last = config.num_hidden_layers
    more = range(last, last + (getattr(config, "num_nextn_predict_layers", None) or 0))
    known = r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"^mtp\."
    return re.compile("|".join((*known, *(rf"^model\.layers\.{index}\." for index in more))))


def points_of(config: Config) -> Points:
    """All that a model of the family has."""
    layers = config.num_hidden_layers
    inside = [points_inside(config, index) for index in range(layers)]
    found = dict(around_layers(layers, config.hidden_size, config.vocab_size))
    found.update((point, tuple(layer.get(point) for layer in inside)) for point in dict.fromkeys(chain(*inside)))
    return found
