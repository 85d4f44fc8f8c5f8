"""What turns the residual stream into logits: the final norm, then the output projection in chunks of its rows.

The output projection is a model's largest matrix, often larger than a layer. In chunks it does not decide how much of a
device a model takes whose weights are streamed. Chunks follow from the model's shape and types, so that logits are the
same wherever its weights are.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from app.gpu.kernels.linear.matrix import Matrix, split, stored_rows
from app.gpu.kernels.linear.shard import WHOLE, Shard
from app.gpu.weights.resident import Weights

Norm = Callable[[Tensor], Tensor]
"""`[rows, hidden]` to the same shape."""

_TILE = 64
"""A chunk has a multiple of this many rows: whole tiles of a library's products."""


class Head:
    """The last bundles of a model: the norm is one, and so is every chunk."""

    def __init__(
        self, norm: Norm, weight: Matrix, layer_bytes: int, weights: Weights, norm_index: int, shard: Shard = WHOLE
    ) -> None:
        """`norm` is the bundle that has just been made, `norm_index`; `weight` is `[vocab, hidden]`. A chunk of it has
        at most as many bytes as a layer, which has `layer_bytes` in the types of the checkpoint, but not less than 64
        rows. The chunks are those of `shard`'s rows.
        """
        self._weights = weights
        self._norm, self._norm_index = norm, norm_index
        self._vocab, self._beside = weight.shape[0], shard.beside
        row_bytes = stored_rows(weight).nbytes // self._vocab
        own = shard.vocabulary(weight)
        self._own = own.shape[0]
        self._chunks = []
        for rows in split(own, max(_TILE, layer_bytes // row_bytes // _TILE * _TILE)):
            with weights.bundle() as bundle:
                self._chunks.append(bundle.linear(rows))

    def __call__(self, hidden: Tensor) -> Tensor:
        """See `LayerStack.head`."""
        with self._weights.using(self._norm_index):
            normed = self._norm(hidden)
        logits = torch.empty(hidden.shape[0], self._own, dtype=torch.float32, device=hidden.device)
        end = 0
        for index, chunk in enumerate(self._chunks, self._norm_index + 1):
            begin, end = end, end + chunk.out_features
            with self._weights.using(index):
                logits[:, begin:end] = chunk(normed)
        return self._beside(logits, self._vocab)
