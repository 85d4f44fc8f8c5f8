"""The host tier's memory: as many blocks as the budget pays for, and copies between it and the device pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from app.gpu.device.streams import DeviceStreams, Event, Runs
from app.gpu.kv_pools.device import KVPool

PIECE_BYTES = 16 << 20
"""Most bytes in one copy: enough for the full bandwidth of the link, few enough that the copies of a step's inputs and
tokens, which need the same copy engine, get their turn between two pieces."""


class HostPool:
    """Host blocks as bytes, `[blocks, block_bytes]` uint8.

    `copy_out` and `copy_in` block until the bytes have arrived, without holding the GIL. One thread may use each of
    them at a time. They know nothing of who owns a block.
    """

    def __init__(self, device: KVPool, num_blocks: int, streams: DeviceStreams, data: Tensor | None = None) -> None:
        """`data` are the host blocks; None: they are allocated here."""
        self._device = device.data.view(torch.uint8).view(device.data.shape[0], -1)
        block_bytes = self._device.shape[1]
        self._longest_run = max(1, PIECE_BYTES // block_bytes)
        self._streams = streams
        self.data = streams.host_slab((num_blocks, block_bytes)) if data is None else data

    def copy_out(self, source: Sequence[int], target: Sequence[int], ready: Event) -> None:
        """Copy device blocks to host blocks, once the device has passed `ready`: what has written them comes before."""
        stream = self._streams.to_host
        stream.wait(ready)
        stream.copy(self.data, self._device, runs_of(source, target, self._longest_run))
        stream.record().synchronize()

    def copy_in(self, source: Sequence[int], target: Sequence[int], ready: Event) -> None:
        """Copy host blocks to device blocks, once the device has passed `ready`: what has used them before has."""
        stream = self._streams.to_device
        stream.wait(ready)
        stream.copy(self._device, self.data, runs_of(source, target, self._longest_run))
        stream.record().synchronize()

    def views(self, blocks: Sequence[int]) -> list[memoryview]:
        """Each block's bytes, writable in place."""
        array = self.data.numpy()
        return [memoryview(array[block]) for block in blocks]

    def spans(self, blocks: Sequence[int]) -> list[memoryview]:
        """The same bytes, with neighbours joined."""
        runs = runs_of(blocks, range(len(blocks)), len(blocks))
        return [self.data[source].view(-1).numpy().data for _, source in runs]

    def now(self) -> Event:
        """The point after all that the engine has launched on the device until now."""
        return self._streams.compute.record()


def runs_of(source: Sequence[int], target: Sequence[int], longest: int) -> Runs:
    """The pairs as runs of neighbours on both sides, `(target, source)`: few long copies are faster than many short."""
    runs: list[tuple[slice, slice]] = []
    start = 0
    for index in range(1, len(source) + 1):
        ends = index in (len(source), start + longest)
        if ends or source[index] != source[index - 1] + 1 or target[index] != target[index - 1] + 1:
            length = index - start
            runs.append((slice(target[start], target[start] + length), slice(source[start], source[start] + length)))
            start = index
    return runs
