"""Pools of KV that rank 0 has a part of: what it copies in its own, it orders in those of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from app.gpu.device.streams import DeviceStreams, Event
from app.gpu.kv.pools import LANDED, KVPool, Landing, Part, SharedHostPool
from app.gpu.models.base import LayerStack
from app.gpu.ranks.leader import Ranks, Way
from app.gpu.ranks.orders import CopyAcross, CopyBlocks
from app.gpu.state.moves import WHOLE_PASSES, HalfPass


class LeadingPool(KVPool):
    """See `KVPool`."""

    def __init__(
        self, ranks: Ranks, stack: LayerStack, num_blocks: int, block_size: int, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(stack, num_blocks, block_size, dtype=dtype)
        self._ranks = ranks

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `KVPool.copy_blocks`."""
        if copies:
            self._ranks.order(CopyBlocks(copies))
        super().copy_blocks(copies)


@dataclass(frozen=True, slots=True)
class _Point:
    """See `Event`: a point on this device, and the orders that the others have been given by then."""

    event: Event
    orders: int

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()


class LeadingHostPool(SharedHostPool):
    """See `HostPool`. A copy is done when all ranks have done theirs."""

    def __init__(self, ranks: Ranks, device: KVPool, num_blocks: int, streams: DeviceStreams) -> None:
        super().__init__(device, num_blocks, streams, Part(0, ranks.count, ranks.slab))
        self._ranks = ranks

    def copy_out(
        self, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass = WHOLE_PASSES
    ) -> None:
        self._copy(Way.OUT, source, target, ready, half)

    def copy_in(
        self, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass = WHOLE_PASSES
    ) -> Landing:
        self._copy(Way.IN, source, target, ready, half)
        return LANDED

    def now(self) -> Event:
        return _Point(super().now(), self._ranks.ordered)

    def _copy(self, way: Way, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass) -> None:
        assert isinstance(ready, _Point)
        own = super().copy_out if way is Way.OUT else super().copy_in
        with self._ranks.copying(way, CopyAcross(source, target, ready.orders, half)):
            own(source, target, ready.event, half)
