"""Running layers of a model over a pool of KV."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from app.gpu.kernels.attention.batch import Batch
from app.gpu.kv.pools import KVPool
from app.gpu.models.base import LayerStack

RunLayers = Callable[[int, int, Tensor, Batch], Tensor]
"""Runs layers `[lo, hi)`, at least one, on `hidden` `[tokens, hidden_size]` of a batch. Returns the same shape, in
memory that may be written to again by the next call.
"""


def layer_by_layer(stack: LayerStack, pool: KVPool, on_layer: Callable[[], None] | None = None) -> RunLayers:
    """Each layer by a call of its own, on any device, for any model and batch. `on_layer` is called before each."""
    return partial(_run_layers, stack, pool, on_layer)


def _run_layers(
    stack: LayerStack,
    pool: KVPool,
    on_layer: Callable[[], None] | None,
    lo: int,
    hi: int,
    hidden: Tensor,
    batch: Batch,
) -> Tensor:
    for layer in range(lo, hi):
        if on_layer is not None:
            on_layer()
        hidden = stack.layer(layer, hidden, batch, pool.layer(layer))
    return hidden
