"""Running a model on all ranks: rank 0 orders each part of a step, and everybody starts from its residual stream.

The others embed nothing, and see no edit or checkpoint: what rank 0's residual stream is at the lower end of a run is
all that they need. Within a run each layer's sums make it whole on every rank.
"""

from __future__ import annotations

from torch import Tensor

from app.gpu.forward.pieces import RunLayers
from app.gpu.kernels.attention.base import Batch
from app.gpu.models.base import LayerStack
from app.gpu.ranks.leader import Ranks
from app.gpu.ranks.orders import Run, RunHead
from app.gpu.ranks.page import Page


class LeadingLayers:
    """A `RunLayers`."""

    def __init__(self, ranks: Ranks, run_layers: RunLayers) -> None:
        """`run_layers` runs the part that is here."""
        self._ranks, self._run_layers = ranks, run_layers

    def __call__(self, lo: int, hi: int, hidden: Tensor, batch: Batch) -> Tensor:
        """See `RunLayers`."""
        run = Run(lo, hi, batch.rows, batch.decodes, len(hidden), batch.block_tables.shape[1])
        page = Page(run, hidden.shape[1], hidden.dtype).pack(hidden, batch)
        return self._ranks.run(run, page, lambda: self._run_layers(lo, hi, hidden, batch))


class LeadingStack:
    """A `LayerStack` whose head is that of all ranks. Its layers are the part that is here, for `LeadingLayers`."""

    def __init__(self, ranks: Ranks, stack: LayerStack) -> None:
        self._ranks, self._stack = ranks, stack
        self.num_layers, self.hidden_size, self.vocab_size = stack.num_layers, stack.hidden_size, stack.vocab_size
        self.kv_heads, self.head_dim, self.max_model_len = stack.kv_heads, stack.head_dim, stack.max_model_len
        self.dtype, self.device, self.parameter_bytes = stack.dtype, stack.device, stack.parameter_bytes
        self.embed, self.layer = stack.embed, stack.layer

    def head(self, hidden: Tensor) -> Tensor:
        """See `LayerStack.head`."""
        return self._ranks.run(RunHead(len(hidden)), hidden.contiguous(), lambda: self._stack.head(hidden))
