"""Model families that run on kernels of ours: a family is a mapping of names and a description of its layers.

One stack serves them all. Its bundles of weights are the layers, the final norm, and chunks of the output projection.
That is a model's largest matrix, often larger than a layer: in chunks it does not decide how much of a device a model
takes whose weights are streamed. Chunks follow from the model's shape and types, so that logits are the same wherever
its weights are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.points import Point, Points, PointShape, around_layers
from app.gpu.kernels.attention.base import Attention, Batch
from app.gpu.kernels.linear.base import (
    WHOLE,
    Linear,
    Matrix,
    Shard,
    Weight,
    dense_of,
    pick_rows,
    split,
    stack,
    stored_rows,
)
from app.gpu.models.adapters import Sites
from app.gpu.models.base import InParts, finish
from app.gpu.models.elementwise import softcap_
from app.gpu.state.layer_state import FoldState, LayerState, attention_state, state_bytes
from app.gpu.weights.bundles import Bundle, ResidentWeights, Weights
from app.gpu.weights.source import WeightSource, take_output_weight

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Layer = Callable[[Tensor, Batch, Tensor], Tensor]
"""`LayerStack.layer` of one layer: of a residual stream, a batch and the layer's part of the pool."""
Elementwise = Callable[[Tensor], Tensor]
"""`[tokens, width]` to the same shape."""


class Folding(Protocol):
    """A `Layer` but for norms and residual stream, which mixes tokens by what it folds them into."""

    def __init__(self, parts: Parts, name: str) -> None: ...

    @staticmethod
    def state_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
        """Of a row's state in one layer that computes in `dtype`."""

    @staticmethod
    def state_numbers(config: PretrainedConfig) -> int:
        """How many numbers that is."""

    def read_states(self, states: Tensor) -> Tensor:
        """The numbers of all rows' `states` `[rows, bytes]`, `[rows, numbers]` float32."""

    def __call__(self, normed: Tensor, batch: Batch, kv: Tensor, /) -> Tensor: ...


_TILE = 64
"""A chunk has a multiple of this many rows: whole tiles of a library's products."""


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families."""

    layer: Callable[[Attention, Any, int, Parts], Layer]
    """Makes a layer: of an attention, the `tables`, its number and its parts."""
    norm: Callable[[Parts, str], Elementwise]
    """Makes the norm of that name."""
    tokens: str
    """The table of embeddings."""
    final_norm: str
    divided: Callable[[PretrainedConfig], Sequence[int]]
    """What the number of ranks must divide, at the least the KV heads; empty if layers cannot be cut."""
    activation: Callable[[PretrainedConfig], str]
    """The MLP's."""
    own_activations: frozenset[str]
    """Those that have a kernel of ours on a CPU."""
    unused: Callable[[PretrainedConfig], re.Pattern[str]]
    """Tensors of checkpoints that nothing needs."""
    points: Callable[[PretrainedConfig, int], Mapping[Point, PointShape]]
    """Those inside a layer, by its number, that it gives to `Batch.taps`."""
    tables: Callable[[PretrainedConfig, int, Weights], Any] | None = None
    """Makes what all layers look up, of a config, the longest sequence and the weights."""
    positions: str | None = None
    """The table of learned positions, if there is one."""
    window: Callable[[PretrainedConfig, int], int | None] = lambda config, index: None
    """How many of the last tokens a layer sees, by its number; None: all."""
    folded: Callable[[PretrainedConfig, int, torch.dtype], int] = lambda config, index, dtype: 0
    """Bytes of what a layer folds tokens into, by its number, if layers compute in that type; 0: it does not."""
    attends: Callable[[PretrainedConfig, int], bool] = lambda config, index: True
    """Whether a layer attends, by its number."""
    kv_shape: Callable[[PretrainedConfig], tuple[int, int]] = lambda config: (kv_heads_of(config), head_dim_of(config))
    """Heads of keys and values that are kept of a token in each layer, and numbers of each."""
    turned: bool = False
    """Whether layers' matrices are stored `[in, out]` (Transformers' `Conv1D`), not `[out, in]`."""
    embedding_scale: Callable[[PretrainedConfig, torch.dtype], float] = lambda config, dtype: 1.0
    """What embeddings are multiplied by, in the type of the computation."""
    logit_scale: Callable[[PretrainedConfig], float] = lambda config: 1.0
    """What logits are multiplied by."""
    logit_cap: Callable[[PretrainedConfig], float | None] = lambda config: None
    """The bound of logits, as of scores in `AttentionSpec.softcap`; None: none."""


class Writer(NamedTuple):
    """An output projection whose whole result is added to the residual stream."""

    linear: Linear
    scale: float
    """The factor of its result."""
    norm: tuple[Weight, float] | None = None
    """The weight and the epsilon of the root-mean-square norm after it; None: no norm follows."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Takes from a checkpoint what one bundle is made of: of each matrix the share of a shard."""

    family: Family
    config: PretrainedConfig
    source: WeightSource
    shard: Shard
    bundle: Bundle
    device: torch.device
    """On which layers compute."""
    dtype: torch.dtype
    """In which they do."""
    sites: Sites
    first_state: int = 0
    """Where in the bytes of a row's state those of the layer begin."""
    state_fits: list[Callable[[int], bool]] = field(default_factory=list)
    """`FoldState.fits` of a layer that folds."""
    writers: dict[Point, Writer] = field(default_factory=dict)
    """The output projections of the layer, by the point before each."""

    def hold(self, name: str, *shape: int) -> Weight:
        """The tensor `name`, whole."""
        return self.bundle.hold(self.source.take(name, shape))

    def cut(
        self,
        modules: Mapping[str, Sequence[int]],
        inputs: int,
        *,
        bias: bool,
        orders: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Linear:
        """One layer of the output features of all `modules`, in their order. Each name has the sizes of the parts that
        its features are made of: of every part the shard has its share. `orders` are those of the features of some
        modules, `[features]` int64 on the host; others have theirs.
        """
        weights, biases = list[Matrix](), list[Tensor]()
        for name, sizes in modules.items():
            matrix, order = self._matrix(name, sum(sizes), inputs), orders.get(name)
            matrix = matrix if order is None else pick_rows(matrix, order)
            weights += [self.shard.rows(part) for part in split(matrix, list(sizes))]
            if bias:
                taken = self.source.take(f"{name}.bias", (sum(sizes),))
                taken = taken if order is None else dense_of(pick_rows(taken, order))
                biases += [self.shard.values(part) for part in taken.split(list(sizes))]
        linear = self.bundle.linear(stack(weights), torch.cat(biases) if bias else None)
        return self.sites.adapted(linear, {name: sum(sizes) for name, sizes in modules.items()}, inputs, orders)

    def summed(self, name: str, outputs: int, inputs: int, *, bias: bool) -> Linear:
        """The layer that takes what each shard has of `inputs`."""
        return self.shard.summed(self.part_of_sum(name, outputs, inputs, bias=bias))

    def part_of_sum(self, name: str, outputs: int, inputs: int, *, bias: bool) -> Linear:
        """The same, of which all shards' results are yet to be summed."""
        weight = self.shard.columns(self._matrix(name, outputs, inputs))
        taken = self.shard.once(self.source.take(f"{name}.bias", (outputs,))) if bias else None
        return self.sites.adapted(self.bundle.linear(weight, taken), {name: outputs}, inputs)

    def _matrix(self, name: str, outputs: int, inputs: int) -> Matrix:
        if not self.family.turned:
            return self.source.take_matrix(f"{name}.weight", (outputs, inputs))
        return dense_of(self.source.take_matrix(f"{name}.weight", (inputs, outputs))).t().contiguous()


class OwnStack:
    """A `LayerStack` of any family."""

    def __init__(
        self,
        family: Family,
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
        kv_heads, self.head_dim = family.kv_shape(config)
        self.kv_heads = shard.share(kv_heads)
        self.dtype, self.device = weights.dtype, weights.device
        states = [self._state(family, config, index) for index in range(self.num_layers)]
        self.states: Sequence[LayerState] = states
        self.max_model_len = max_model_len
        self._weights, self._shard, self.sites = weights, shard, Sites()
        self.head_in_parts = self._head_in_parts if isinstance(weights, ResidentWeights) else None
        tables = None if family.tables is None else family.tables(config, max_model_len, weights)
        self._layers, self._writers = list[Layer](), list[Mapping[Point, Writer]]()
        for index in range(self.num_layers):
            with weights.bundle() as bundle:
                first = state_bytes(states[:index])
                parts = Parts(family, config, source, shard, bundle, self.device, self.dtype, self.sites, first)
                self._layers.append(family.layer(attention, tables, index, parts))
                state = states[index]
                if isinstance(state, FoldState):
                    states[index] = replace(state, fits=parts.state_fits)
                self._writers.append(parts.writers)
        layer_bytes = source.nbytes // self.num_layers
        self._positions = None
        if family.positions is not None:
            shape = (config.max_position_embeddings, self.hidden_size)
            self._positions = weights.table(source.take_matrix(family.positions, shape))
        tokens = source.take_matrix(family.tokens, (self.vocab_size, self.hidden_size))
        self._tokens = weights.table(tokens)
        with weights.bundle() as bundle:
            parts = Parts(family, config, source, shard, bundle, self.device, self.dtype, self.sites)
            self._norm = family.norm(parts, family.final_norm)
        self._output = self._chunk(take_output_weight(source, config, tokens), layer_bytes)
        source.finish(family.unused(config))
        self._embedding_scale = family.embedding_scale(config, self.dtype)
        self.points = (
            points_of(family, config)
            if shard.ranks == 1
            else around_layers(self.num_layers, self.hidden_size, self.vocab_size)
        )
        self._logit_scale, self._logit_cap = family.logit_scale(config), family.logit_cap(config)
        self.parameter_bytes = source.nbytes

    def _state(self, family: Family, config: PretrainedConfig, index: int) -> LayerState:
        folded, attention = family.folded(config, index, self.dtype), None
        if family.attends(config, index):
            attention = attention_state(self.kv_heads, self.head_dim, family.window(config, index))
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
            yield
        if self._logit_scale != 1:
            logits.mul_(self._logit_scale)
        if self._logit_cap is not None:
            softcap_(logits, self._logit_cap)
        return self._shard.beside(logits, self.vocab_size)

    def toward(self, token_id: int) -> Tensor:
        each, first = torch.eye(self.hidden_size, dtype=self.dtype, device=self.device), 0
        for index, chunk in enumerate(self._output, self.num_layers + 1):
            if token_id < first + chunk.out_features:
                with self._weights.using(index):
                    return torch.cat([chunk(rows)[:, token_id - first] for rows in each.split(256)]).float() * (
                        self._logit_scale
                    )
            first += chunk.out_features
        raise IndexError(token_id)

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


def points_of(family: Family, config: PretrainedConfig) -> Points:
    """All that a model of the family has."""
    layers = config.num_hidden_layers
    inside = [family.points(config, index) for index in range(layers)]
    found = dict(around_layers(layers, config.hidden_size, config.vocab_size))
    found.update((point, tuple(layer.get(point) for layer in inside)) for point in dict.fromkeys(chain(*inside)))
    return found


def attention_points(heads: int, kv_heads: int, head_dim: int) -> dict[Point, PointShape]:
    """Those of queries, keys and values, before and behind rotation."""
    queries, keys = PointShape(heads * head_dim, heads), PointShape(kv_heads * head_dim, kv_heads)
    found = dict.fromkeys((Point.Q, Point.Q_ROT, Point.Z), queries)
    return found | dict.fromkeys((Point.K, Point.K_ROT, Point.V), keys) | {Point.PATTERN: PointShape(heads, heads)}


def kv_heads_of(config: PretrainedConfig) -> int:
    """Those that attention has; 1 of a model without any."""
    heads: int = getattr(config, "num_key_value_heads", getattr(config, "num_attention_heads", 1))
    return heads


def head_dim_of(config: PretrainedConfig) -> int:
    """The width of an attention head."""
    own: int | None = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def activation_of(name: str) -> Elementwise:
    """The activation that Transformers has under that name. Raises FieldOutOfRange if it has none."""
    from transformers.activations import ACT2FN  # imports much of Transformers

    if name not in ACT2FN:
        raise FieldOutOfRange(f"config.json: the activation {name!r} is not one of Transformers'", param="model")
    activation: Elementwise = ACT2FN[name]
    return activation
