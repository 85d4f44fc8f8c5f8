"""Memory of KV on the device and on the host, and copies between the two."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.gpu.device.hardware import zeroed
from app.gpu.device.streams import DeviceStreams, Event, Run, Stream
from app.gpu.kernels.attention.base import columns_of
from app.gpu.models.base import LayerStack
from app.gpu.state.layer_state import STATE_ALIGN, UNDIVIDED, FoldState, divide, keeps_tokens, state_bytes
from app.gpu.state.moves import WHOLE_PASSES, HalfPass

PIECE_BYTES = 16 << 20
"""Most bytes in one copy: enough for the full bandwidth of the link, few enough that the copies of a step's inputs and
tokens, which need the same copy engine, get their turn between two pieces."""

LATE_S = 0.0025
"""For about so long may the last bytes of a move still be on their way to the device when it is told of. The host takes
that long until it has launched something that reads them; an H200's took 1.7 ms."""
FORGETS = 0.9
"""Of the best rate that was seen, with each long move: what else uses the link changes."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""A CPU copies rows of the first one twenty times as fast as rows of bytes."""


class KVPool:
    """Block-major storage, `[blocks, layers, 2, kv_heads, block_size, columns]`: one block is one run of bytes. A
    row of `columns` elements is a head's key or value (`attention.base`). The layers are those of one group.

    Blocks also take the state of a sequence's folding layers: `state_blocks` of them, one behind the other.
    """

    def __init__(
        self,
        stack: LayerStack,
        num_blocks: int,
        block_size: int,
        memory: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`memory`, uint8 zeros on the device, has the blocks at its start; None: they get new memory. Their
        elements are of `dtype`; None: as the stack computes.
        """
        dtype = dtype or stack.dtype
        columns, division = columns_of(stack.head_dim, dtype), divide(stack.states)
        shape = (num_blocks, division.layers, 2, stack.kv_heads, block_size, columns)
        if memory is None:
            self.data = zeroed(shape, dtype, stack.device)
        else:
            size = torch.Size(shape).numel() * dtype.itemsize
            self.data = memory[:size].view(dtype).view(shape)
        self.block_size = block_size if keeps_tokens(stack.states) else UNDIVIDED
        self._layers = [self.data[:, place] for _, place in division.places]
        self.group_of = [group for group, _ in division.places]
        """Of each layer: its block tables are those of this group."""
        self.groups = division.groups.size
        block_bytes = self.data[:1].nbytes
        self.state_blocks = -(-state_bytes(stack.states) // block_bytes)
        self.state_room = self.state_blocks * block_bytes
        """Bytes of the blocks that a state takes."""
        self.state_bytes_below = [state_bytes(stack.states[:layer]) for layer in range(len(stack.states) + 1)]
        """Of a state, how many bytes at its beginning are of layers below each boundary."""
        word = next(word for word in _WORDS if block_bytes % word.itemsize == 0)
        self._words = self.data.view(torch.uint8).view(num_blocks, -1).view(word) if self.state_blocks else None
        self._room: Tensor | None = None
        folding = [state for state in stack.states if isinstance(state, FoldState) and state.nbytes]
        fits = [state.fits is not None and all(part_fits(block_bytes) for part_fits in state.fits) for state in folding]
        self.folds_in_place = stack.device.type == "cpu" and block_bytes % STATE_ALIGN == 0 and all(fits)
        """Whether layers can fold into states where they are, in `blocks`."""

    @property
    def blocks(self) -> Tensor:
        """All of them, `[blocks, block bytes]` uint8: a view."""
        return self.data.view(torch.uint8).view(len(self.data), -1)

    def layer(self, index: int) -> Tensor:
        """Layer `index` of every block of its group: `[blocks, 2, kv_heads, block_size, columns]`, a view. Of a layer
        that does not attend it is another's, which it does not touch.
        """
        return self._layers[index]

    def read_states(self, blocks: Tensor, *, room: int = 0) -> Tensor:
        """A copy of the states in `blocks`, `[rows, state_blocks]` int64: `[rows, words]`, integers of the same bytes.
        With `room` there are so many rows, the others behind these and without values. On a CPU they are true until the
        next such call: for new memory it takes longer than for the copy.
        """
        assert self._words is not None
        if not room:
            return self._words[blocks].flatten(1)
        count, out = room * self.state_blocks, self._room
        if out is None or len(out) < count:
            out = self._words.new_empty(count, self._words.shape[1])
            self._room = None if out.is_cuda else out
        torch.index_select(self._words, 0, blocks.flatten(), out=out[: blocks.numel()])
        return out[:count].view(room, -1)

    def write_states(self, blocks: Tensor, states: Tensor) -> None:
        """Put states, as `read_states` gives them, into `blocks`, `[rows, state_blocks]` int64."""
        assert self._words is not None
        self._words.index_copy_(0, blocks.flatten(), states.view(blocks.numel(), -1))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, `(source, target)` each, in order."""
        for source, target in copies:
            self.data[target].copy_(self.data[source])


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
        self._rate = 0.0
        """The most bytes a second that recent long moves have brought to the device."""

    @property
    def late_bytes(self) -> int:
        """As many as come in `LATE_S`, as far as recent moves tell; never more than half of a move are late."""
        return 0 if self._streams.on_host else int(LATE_S * self._rate)

    def copy_out(
        self, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass = WHOLE_PASSES
    ) -> None:
        """Copy device blocks to host blocks, once the device has passed `ready`: what has written them comes before."""
        stream = self._streams.to_host
        stream.wait(ready)
        for runs, size in self._parts(source, target, half):
            self._take_out(stream, runs, size)
        stream.record().synchronize()

    def copy_in(
        self, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass = WHOLE_PASSES
    ) -> tuple[Event, float]:
        """Copy host blocks to device blocks, once the device has passed `ready`: what has used them before has. Returns
        a little before the end of a large move, so that its next step is launched when its last bytes arrive: at what
        point they have, and which share of all has. What reads the blocks, or writes to where they come from, comes
        after that point.
        """
        began, stream = time.perf_counter(), self._streams.to_device
        stream.wait(ready)
        early = len(source) - self._count_late(len(source), half)
        halves = max(0, early - len(source) + half.blocks)
        near = self._launch(stream, source[:early], target[:early], replace(half, blocks=halves))
        landed = self._launch(stream, source[early:], target[early:], replace(half, blocks=half.blocks - halves))
        near.synchronize()
        arrived = self._bytes(early, halves, half)
        seconds = time.perf_counter() - began
        if seconds > LATE_S:  # a shorter move tells of its start more than of the link
            self._rate = max(FORGETS * self._rate, arrived / seconds)
        return landed, arrived / self._bytes(len(source), half.blocks, half)

    def follow(self, landed: Event) -> None:
        """Have what is launched on the device from now on come after the event."""
        self._streams.compute.wait(landed)

    def _launch(self, stream: Stream, source: Sequence[int], target: Sequence[int], half: HalfPass) -> Event:
        """Launch copies to the device; returns the point after them."""
        for runs, size in self._parts(source, target, half):
            self._bring_in(stream, runs, size)
        return stream.record()

    def _take_out(self, stream: Stream, runs: Iterator[Run], size: int) -> None:
        """Launch copies of the first `size` bytes of blocks to the host."""
        stream.copy(self.data[:, :size], self._device[:, :size], runs)

    def _bring_in(self, stream: Stream, runs: Iterator[Run], size: int) -> None:
        """The same to the device."""
        stream.copy(self._device[:, :size], self.data[:, :size], runs)

    def _count_late(self, blocks: int, half: HalfPass) -> int:
        """How many of the blocks are told of before they have come."""
        late_bytes = min(self.late_bytes, self._bytes(blocks, half.blocks, half) // 2)
        halves = min(half.blocks, late_bytes // self._bytes(1, 1, half)) if half.blocks else 0
        if halves < half.blocks:
            return halves
        return halves + (late_bytes - self._bytes(halves, halves, half)) // self._bytes(1, 0, half)

    def _bytes(self, blocks: int, halves: int, half: HalfPass) -> int:
        """Of so many blocks, of which so many have KV of the half pass."""
        return (blocks - halves) * self._device.shape[1] + halves * half.layers * self._layer_bytes

    def _parts(
        self, source: Sequence[int], target: Sequence[int], half: HalfPass
    ) -> Iterator[tuple[Iterator[Run], int]]:
        """The runs of whole blocks, and those of the blocks of a half pass, with the bytes of each block to copy. The
        first layers of two blocks are no run of bytes, so each of those blocks is its own run.
        """
        whole = len(source) - half.blocks
        if whole:
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


def runs_of(source: Sequence[int], target: Sequence[int], longest: int) -> Iterator[Run]:
    """The pairs as runs of neighbours on both sides, `(target, source)`: few long copies are faster than many short.
    Each is given as soon as it is found: the first copies are under way while the last runs are looked for.
    """
    start = 0
    for index in range(1, len(source) + 1):
        ends = index in (len(source), start + longest)
        if ends or source[index] != source[index - 1] + 1 or target[index] != target[index - 1] + 1:
            length = index - start
            yield slice(target[start], target[start] + length), slice(source[start], source[start] + length)
            start = index


def _map_blocks(slab: int, blocks: int, block_bytes: int) -> Tensor:
    """Host blocks in the memory that has this descriptor, `[blocks, block_bytes]` uint8. They begin as zeros; the
    machine gives memory as it is written.
    """
    size = blocks * block_bytes
    if not size:
        return torch.zeros((blocks, block_bytes), dtype=torch.uint8)
    if os.fstat(slab).st_size < size:
        os.ftruncate(slab, size)
    memory = mmap.mmap(slab, size, flags=mmap.MAP_SHARED)
    return torch.frombuffer(memory, dtype=torch.uint8).view(blocks, block_bytes)


class SharedHostPool(HostPool):
    """Host blocks that all ranks of a model reach: each copies its own heads to and from blocks that lie there whole,
    as one process would keep them. So files and moves to other servers, which rank 0 alone sees to, do not depend on
    the number of ranks.

    A rank's heads are runs of bytes within a host block, which no copy engine takes at once. So they pass through a
    piece of memory of the rank's own.
    """

    late_bytes = 0

    def __init__(
        self, device: KVPool, num_blocks: int, streams: DeviceStreams, *, rank: int, ranks: int, slab: int
    ) -> None:
        """The blocks with the heads of all `ranks` are in memory that has the descriptor `slab`."""
        blocks, layers = device.data.shape[:2]
        own_bytes = device.data.nbytes // blocks
        super().__init__(device, num_blocks, streams, _map_blocks(slab, num_blocks, own_bytes * ranks))
        lines = 2 * layers  # the keys of a layer, or its values
        whole = self.data.numpy().reshape(num_blocks, lines, own_bytes * ranks // lines)
        self._own = np.split(whole, ranks, axis=2)[rank]
        self._line_bytes = own_bytes // lines
        self._going, self._coming = (streams.host_tensor((self._longest_run, own_bytes), torch.uint8) for _ in range(2))

    def _take_out(self, stream: Stream, runs: Iterator[Run], size: int) -> None:
        lines = slice(0, size // self._line_bytes)
        for write, read in runs:
            here = slice(0, write.stop - write.start)
            stream.copy(self._going[:, :size], self._device[:, :size], ((here, read),))
            stream.record().synchronize()
            np.copyto(self._own[write, lines], self._lines_of(self._going)[here, lines])

    def _bring_in(self, stream: Stream, runs: Iterator[Run], size: int) -> None:
        lines = slice(0, size // self._line_bytes)
        for write, read in runs:
            here = slice(0, write.stop - write.start)
            np.copyto(self._lines_of(self._coming)[here, lines], self._own[read, lines])
            stream.copy(self._device[:, :size], self._coming[:, :size], ((write, here),))
            stream.record().synchronize()

    def _lines_of(self, staging: Tensor) -> NDArray[np.uint8]:
        """The memory of a piece as this rank's part of host blocks, `[blocks, lines, line bytes]`."""
        return staging.numpy().reshape(-1, *self._own.shape[1:])
