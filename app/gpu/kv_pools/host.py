"""The host tier's memory: as many blocks as the budget pays for, and copies between it and the device pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from app.gpu.device.streams import DeviceStreams, Event, Runs
from app.gpu.kv.moves import WHOLE_PASSES, HalfPass
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
        self._layer_bytes = block_bytes // device.data.shape[1]
        self._longest_run = max(1, PIECE_BYTES // block_bytes)
        self._streams = streams
        self.data = streams.host_slab((num_blocks, block_bytes)) if data is None else data

    def copy_out(
        self, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass = WHOLE_PASSES
    ) -> None:
        """Copy device blocks to host blocks, once the device has passed `ready`: what has written them comes before."""
        stream = self._streams.to_host
        stream.wait(ready)
        for runs, size in self._parts(source, target, half):
            stream.copy(self.data[:, :size], self._device[:, :size], runs)
        stream.record().synchronize()

    def copy_in(
        self, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass = WHOLE_PASSES
    ) -> None:
        """Copy host blocks to device blocks, once the device has passed `ready`: what has used them before has."""
        stream = self._streams.to_device
        stream.wait(ready)
        for runs, size in self._parts(source, target, half):
            stream.copy(self._device[:, :size], self.data[:, :size], runs)
        stream.record().synchronize()

    def _parts(self, source: Sequence[int], target: Sequence[int], half: HalfPass) -> Iterator[tuple[Runs, int]]:
        """The runs of whole blocks, and those of the blocks of a half pass, with the bytes of each block to copy. The
        first layers of two blocks are no run of bytes, so each of those blocks is a run of its own.
        """
        whole = len(source) - half.blocks
        yield runs_of(source[:whole], target[:whole], self._longest_run), self._device.shape[1]
        if half.blocks:
            yield runs_of(source[whole:], target[whole:], 1), half.layers * self._layer_bytes

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
