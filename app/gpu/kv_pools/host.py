"""The host tier's memory: as many blocks as the budget pays for, and copies between it and the device pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from app.gpu.device.streams import PASSED, DeviceStreams, Event, Runs, Stream
from app.gpu.kv.moves import WHOLE_PASSES, HalfPass
from app.gpu.kv_pools.device import KVPool

Copy = tuple[tuple[slice, slice], int]
"""A run of blocks, `(target, source)`, and the bytes of each block to copy."""
PIECE_BYTES = 16 << 20
"""Most bytes in one copy: enough for the full bandwidth of the link, few enough that the copies of a step's inputs and
tokens, which need the same copy engine, get their turn between two pieces."""

LATE_BYTES = 64 << 20
"""So many of a large move's bytes may still be on their way to the device when it is told of. They take a millisecond
or two, as the host does until it has launched something that reads them."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Blocks on their way to the device, of whose bytes the `share` has arrived, and all have once it passes `event`.
    What reads them, or writes to where they come from, comes after that.
    """

    event: Event
    share: float


LANDED = Landing(PASSED, 1.0)


class HostPool:
    """Host blocks as bytes, `[blocks, block_bytes]` uint8.

    `copy_out` and `copy_in` block until the bytes have arrived, or nearly all of them, without holding the GIL. One
    thread may use each of them at a time. They know nothing of who owns a block.
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
    ) -> Landing:
        """Copy host blocks to device blocks, once the device has passed `ready`: what has used them before has. Returns
        a little before the end of a large move, so that its next step is launched when its last bytes arrive.
        """
        stream = self._streams.to_device
        stream.wait(ready)
        copies = [(run, size) for runs, size in self._parts(source, target, half) for run in runs]
        early = len(copies) if self._streams.on_host else _count_early(copies)
        near = self._launch(stream, copies[:early])
        landed = self._launch(stream, copies[early:])
        near.synchronize()
        return LANDED if early == len(copies) else Landing(landed, _bytes(copies[:early]) / _bytes(copies))

    def follow(self, landed: Event) -> None:
        """Have what is launched on the device from now on come after the event."""
        self._streams.compute.wait(landed)

    def _launch(self, stream: Stream, copies: Sequence[Copy]) -> Event:
        """Launch copies to the device; returns the point after them."""
        for size, alike in groupby(copies, key=itemgetter(1)):
            stream.copy(self._device[:, :size], self.data[:, :size], [run for run, _ in alike])
        return stream.record()

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


def _count_early(copies: Sequence[Copy]) -> int:
    """How many of the copies come before the last `LATE_BYTES`; all, if those would be more than half."""
    whole, late, early = _bytes(copies), 0, len(copies)
    while early and late + _bytes(copies[early - 1 : early]) <= LATE_BYTES:
        early -= 1
        late += _bytes(copies[early : early + 1])
    return early if late <= whole // 2 else len(copies)


def _bytes(copies: Sequence[Copy]) -> int:
    return sum((write.stop - write.start) * size for (write, _), size in copies)


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
