"""What layers are built of: the tensors of a checkpoint, of each matrix the share of a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.points import Point, PointShape
from app.gpu.kernels.attention.base import Batch
from app.gpu.kernels.linear.base import Matrix, Shard, Weight, dense_of, pick_rows, split, stack
from app.gpu.models.adapters import Dense, Sites
from app.gpu.weights.bundles import Bundle
from app.gpu.weights.source import WeightSource
from app.model_store.saved import Config

Layer = Callable[[Tensor, Batch, Tensor], Tensor]
"""`LayerStack.layer` of one layer: of a residual stream, a batch and the layer's part of the pool."""
Elementwise = Callable[[Tensor], Tensor]
"""`[tokens, width]` to the same shape."""


Writer = tuple[Dense, float, tuple[Weight, float] | None]
"""An output projection whose whole result is added to the residual stream, the factor of its result, and the weight and
the epsilon of the root-mean-square norm after it; None: no norm follows.
"""


@dataclass(frozen=True, slots=True)
class Parts:
    """Takes from a checkpoint what one bundle is made of: of each matrix the share of a shard."""

    config: Config
    source: WeightSource
    shard: Shard
    device: torch.device
    """On which layers compute."""
    dtype: torch.dtype
    """In which they do."""
    turned: bool
    """Whether the checkpoint has matrices as `[in, out]` (Transformers' `Conv1D`)."""
    sites: Sites
    bundle: Bundle
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
    ) -> Dense:
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

    def part_of_sum(self, name: str, outputs: int, inputs: int, *, bias: bool = False) -> Dense:
        """The layer that takes what the shard has of `inputs`. `Shard.total` sums the results of all."""
        weight = self.shard.columns(self._matrix(name, outputs, inputs))
        taken = self.shard.once(self.source.take(f"{name}.bias", (outputs,))) if bias else None
        return self.sites.adapted(self.bundle.linear(weight, taken), {name: outputs}, inputs)

    def _matrix(self, name: str, outputs: int, inputs: int) -> Matrix:
        if not self.turned:
            return self.source.take_matrix(f"{name}.weight", (outputs, inputs))
        return dense_of(self.source.take_matrix(f"{name}.weight", (inputs, outputs))).t().contiguous()


def attention_points(heads: int, kv_heads: int, head_dim: int) -> dict[Point, PointShape]:
    """Those of queries, keys and values, before and behind rotation."""
    queries, keys = PointShape(heads * head_dim, heads), PointShape(kv_heads * head_dim, kv_heads)
    found = dict.fromkeys((Point.Q, Point.Q_ROT, Point.Z), queries)
    return found | dict.fromkeys((Point.K, Point.K_ROT, Point.V), keys) | {Point.PATTERN: PointShape(heads, heads)}


def kv_heads_of(config: Config) -> int:
    """Those that attention has; 1 of a model without any."""
    heads: int = getattr(config, "num_key_value_heads", getattr(config, "num_attention_heads", 1))
    return heads


def head_dim_of(config: Config) -> int:
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
