"""Running a model on all ranks: rank 0 orders each part of a step, and everybody starts from its residual stream.

The others embed nothing, and see no edit or checkpoint: what rank 0's residual stream is at the lower end of a run is
all that they need. Within a run each layer's sums make it whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.gpu.device.streams import DeviceStreams, Event
from app.gpu.forward.pieces import RunLayers
from app.gpu.kernels.attention.base import Batch
from app.gpu.kv.pools import LANDED, KVPool, Landing, Part, SharedHostPool
from app.gpu.models.base import LayerStack
from app.gpu.ranks.leader import Direction, Ranks
from app.gpu.ranks.orders import CopyAcross, CopyBlocks, Page, Run, RunHead
from app.gpu.state.moves import WHOLE_PASSES, HalfPass


def leading_layers(ranks: Ranks, run_layers: RunLayers) -> RunLayers:
    """Layers of all ranks: `run_layers` runs the part that is here, while the others run theirs."""

    def run(lo: int, hi: int, hidden: Tensor, batch: Batch) -> Tensor:
        order = Run(lo, hi, batch.rows, batch.decodes, len(hidden), batch.block_tables.shape[1])
        page = Page(order, hidden.shape[1], hidden.dtype).pack(hidden, batch)
        return ranks.run(order, page, lambda: run_layers(lo, hi, hidden, batch))

    return run


class LeadingStack:
    """A `LayerStack` whose head is that of all ranks. Its layers are the part that is here, for `leading_layers`."""

    def __init__(self, ranks: Ranks, stack: LayerStack) -> None:
        self._ranks, self._stack = ranks, stack
        self.num_layers, self.hidden_size, self.vocab_size = stack.num_layers, stack.hidden_size, stack.vocab_size
        self.kv_heads, self.head_dim, self.max_model_len = stack.kv_heads, stack.head_dim, stack.max_model_len
        self.dtype, self.device, self.parameter_bytes = stack.dtype, stack.device, stack.parameter_bytes
        self.embed, self.layer = stack.embed, stack.layer

    def head(self, hidden: Tensor) -> Tensor:
        return self._ranks.run(RunHead(len(hidden)), hidden.contiguous(), lambda: self._stack.head(hidden))


class LeadingPool(KVPool):
    """A `KVPool` of which each rank has a part."""

    def __init__(
        self, ranks: Ranks, stack: LayerStack, num_blocks: int, block_size: int, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(stack, num_blocks, block_size, dtype=dtype)
        self._ranks = ranks

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            self._ranks.order(CopyBlocks(copies))
        super().copy_blocks(copies)


@dataclass(frozen=True, slots=True)
class _Point:
    """An `Event` on this device, and the orders that the others have been given by then."""

    event: Event
    orders: int

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()


class LeadingHostPool(SharedHostPool):
    """A `HostPool` whose copies are done when all ranks have done theirs."""

    def __init__(self, ranks: Ranks, device: KVPool, num_blocks: int, streams: DeviceStreams) -> None:
        super().__init__(device, num_blocks, streams, Part(0, ranks.count, ranks.slab))
        self._ranks = ranks

    def copy_out(
        self, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass = WHOLE_PASSES
    ) -> None:
        self._copy(Direction.OUT, source, target, ready, half)

    def copy_in(
        self, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass = WHOLE_PASSES
    ) -> Landing:
        self._copy(Direction.IN, source, target, ready, half)
        return LANDED

    def now(self) -> Event:
        return _Point(super().now(), self._ranks.ordered)

    def _copy(
        self, direction: Direction, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass
    ) -> None:
        assert isinstance(ready, _Point)
        own = super().copy_out if direction is Direction.OUT else super().copy_in
        with self._ranks.copying(direction, CopyAcross(source, target, ready.orders, half)):
            own(source, target, ready.event, half)
