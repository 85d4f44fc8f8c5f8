"""The engine's memory map."""

import time
from collections import Counter
from collections.abc import Callable, Collection

from app.domain.memory_map import MemoryMap, SessionMemory, StackUse, StepCounts, TextUse, TierUse
from app.gpu.planning.scheduler import Scheduler
from app.gpu.state.blocks import BlockPool
from app.gpu.state.sequence import TokenSequence


class Inspector:
    """Reads the engine's book-keeping. Sizes in bytes."""

    def __init__(
        self,
        scheduler: Scheduler,
        text: Callable[[], TextUse],
        steps: Callable[[], StepCounts],
        stack: Callable[[], StackUse],
    ) -> None:
        self._scheduler = scheduler
        self._placement = scheduler.placement
        self._text, self._steps, self._stack = text, steps, stack
        self._block_bytes = scheduler.placement.tiers.block_bytes

    def session(self, sequence: TokenSequence) -> SessionMemory:
        """Where one session's KV is."""
        traffic, size = sequence.traffic, self._block_bytes
        return SessionMemory(
            tokens=len(sequence.tokens),
            computed_tokens=sequence.computed,
            tier=sequence.tier,
            blocks=self._scheduler.cache.pool.blocks_for(sequence.written),
            device_bytes=len(sequence.blocks) * size,
            host_bytes=len(sequence.host_blocks) * size,
            disk_bytes=sequence.disk_blocks * size,
            bytes_out=traffic.bytes_out,
            bytes_in=traffic.bytes_in,
            restores=traffic.restores,
            block_tokens=self._scheduler.cache.pool.block_size,
            block_bytes=size,
        )

    def memory(self, sequences: Collection[TokenSequence]) -> MemoryMap:
        """The whole map."""
        began = time.perf_counter()
        device, host = self._scheduler.cache.pool, self._scheduler.cache.host
        placement, size = self._placement, self._block_bytes
        return MemoryMap(
            text=self._text(),
            kv_total_bytes=device.num_blocks * size,
            kv_owned_bytes=device.owned * size,
            kv_cached_bytes=device.cached * size,
            block_bytes=size,
            block_tokens=device.block_size,
            sessions=len(sequences),
            sessions_by_tier=Counter(sequence.tier for sequence in sequences if sequence.tier is not None),
            host=_use(host, size),
            disk=TierUse(placement.disk_blocks * size, placement.tiers.file_blocks * size),
            moves=self._placement.meter.totals(),
            counts=self._placement.counts(),
            running=len(self._scheduler.queue.running),
            waiting=len(self._scheduler.queue.waiting),
            steps=self._steps(),
            drafts=self._scheduler.drafting.counts(),
            stack=self._stack(),
            seconds=time.perf_counter() - began,
        )


def _use(pool: BlockPool, block_bytes: int) -> TierUse:
    return TierUse(pool.num_blocks * block_bytes, pool.owned * block_bytes, pool.cached * block_bytes)
