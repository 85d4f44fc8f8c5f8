"""Host blocks that all ranks of a model reach: each copies its own heads to and from blocks that lie there whole, as
one process would keep them. So files and moves to other servers, which rank 0 alone sees to, do not depend on the
number of ranks.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.gpu.device.streams import DeviceStreams, Event
from app.gpu.kv.device_pool import KVPool
from app.gpu.kv.host_pool import LANDED, HostPool, Landing
from app.gpu.state.moves import WHOLE_PASSES, HalfPass


def open_slab() -> int:
    """A descriptor of memory without a name, which has no bytes yet."""
    return os.memfd_create("djinn-kv-host")


@dataclass(frozen=True, slots=True)
class Part:
    """The heads of `rank` in the blocks at `descriptor`, which have those of all `ranks`."""

    rank: int
    ranks: int
    descriptor: int

    def map(self, blocks: int, own_bytes: int) -> Tensor:
        """The blocks, `[blocks, block_bytes]` uint8, of which `own_bytes` each are this rank's. They begin as zeros;
        the machine gives memory as it is written.
        """
        block_bytes = own_bytes * self.ranks
        size = blocks * block_bytes
        if not size:
            return torch.zeros((blocks, block_bytes), dtype=torch.uint8)
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)
        memory = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED)
        return torch.frombuffer(memory, dtype=torch.uint8).view(blocks, block_bytes)


class SharedHostPool(HostPool):
    """See `HostPool`: its copies are those of one rank's heads. They are runs of bytes within a host block, which no
    copy engine takes at once. So they pass through a piece of memory of the rank's own.
    """

    def __init__(self, device: KVPool, num_blocks: int, streams: DeviceStreams, part: Part) -> None:
        blocks, layers = device.data.shape[:2]
        own_bytes = device.data.nbytes // blocks
        super().__init__(device, num_blocks, streams, part.map(num_blocks, own_bytes))
        lines = 2 * layers  # the keys of a layer, or its values
        whole = self.data.numpy().reshape(num_blocks, lines, own_bytes * part.ranks // lines)
        self._own = np.split(whole, part.ranks, axis=2)[part.rank]
        self._line_bytes = own_bytes // lines
        self._going, self._coming = (streams.host_tensor((self._longest_run, own_bytes), torch.uint8) for _ in range(2))

    def copy_out(
        self, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass = WHOLE_PASSES
    ) -> None:
        stream = self._streams.to_host
        stream.wait(ready)
        for runs, size in self._parts(source, target, half):
            for write, read in runs:
                here = slice(0, write.stop - write.start)
                stream.copy(self._going[:, :size], self._device[:, :size], ((here, read),))
                stream.record().synchronize()
                lines = slice(0, size // self._line_bytes)
                np.copyto(self._own[write, lines], self._lines_of(self._going)[here, lines])

    def copy_in(
        self, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass = WHOLE_PASSES
    ) -> Landing:
        stream = self._streams.to_device
        stream.wait(ready)
        for runs, size in self._parts(source, target, half):
            for write, read in runs:
                here = slice(0, write.stop - write.start)
                lines = slice(0, size // self._line_bytes)
                np.copyto(self._lines_of(self._coming)[here, lines], self._own[read, lines])
                stream.copy(self._device[:, :size], self._coming[:, :size], ((write, here),))
                stream.record().synchronize()
        return LANDED

    def _lines_of(self, staging: Tensor) -> NDArray[np.uint8]:
        """The memory of a piece as this rank's part of host blocks, `[blocks, lines, line bytes]`."""
        return staging.numpy().reshape(-1, *self._own.shape[1:])
