"""The host tier's memory: as many blocks as the budget pays for, and copies between it and the device pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from app.gpu.kv_pool import KVPool, zeroed

Runs = list[tuple[slice, slice]]


class HostPool:
    """Host blocks as bytes, `[blocks, block_bytes]` uint8; pinned where the device is a GPU, so that copies overlap.

    `copy_out` and `copy_in` block until the bytes have arrived, without holding the GIL. One thread may use each of
    them at a time. They know nothing of who owns a block.
    """

    def __init__(self, device: KVPool, num_blocks: int) -> None:
        self._device = device.data.view(torch.uint8).view(device.data.shape[0], -1)
        block_bytes = self._device.shape[1]
        self._cuda = self._device.is_cuda
        shape = (num_blocks, block_bytes)
        self.data = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if self._cuda else _pageable(shape)
        self._streams = [torch.cuda.Stream(self._device.device) for _ in range(2)] if self._cuda else []

    def copy_out(self, source: Sequence[int], target: Sequence[int], ready: torch.cuda.Event | None) -> None:
        """Copy device blocks to host blocks, once `ready` has passed on the device."""
        self._copy(self._device, self.data, _runs(source, target), 0, ready)

    def copy_in(self, source: Sequence[int], target: Sequence[int], ready: torch.cuda.Event | None) -> None:
        """Copy host blocks to device blocks, once `ready` has passed on the device."""
        self._copy(self.data, self._device, _runs(source, target), 1, ready)

    def views(self, blocks: Sequence[int]) -> list[memoryview]:
        """Each block's bytes, writable in place."""
        array = self.data.numpy()
        return [memoryview(array[block]) for block in blocks]

    def now(self) -> torch.cuda.Event | None:
        """The point that the device has reached in the engine's work; None on a CPU, where it is always there."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device.device))
        return event

    def _copy(self, source: Tensor, target: Tensor, runs: Runs, direction: int, ready: torch.cuda.Event | None) -> None:
        if not self._cuda:
            origin, goal = source.numpy(), target.numpy()
            for read, write in runs:
                np.copyto(goal[write], origin[read])  # one thread: PyTorch's own are busy with the model
            return
        stream = self._streams[direction]
        with torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            for read, write in runs:
                target[write].copy_(source[read], non_blocking=True)
        stream.synchronize()


def _runs(source: Sequence[int], target: Sequence[int]) -> Runs:
    """The pairs as runs of neighbours on both sides: long copies are faster than many short ones."""
    runs: Runs = []
    start = 0
    for index in range(1, len(source) + 1):
        ends = index == len(source)
        if ends or source[index] != source[index - 1] + 1 or target[index] != target[index - 1] + 1:
            length = index - start
            runs.append((slice(source[start], source[start] + length), slice(target[start], target[start] + length)))
            start = index
    return runs


def _pageable(shape: tuple[int, ...]) -> Tensor:
    return zeroed(shape, torch.uint8, torch.device("cpu"))
