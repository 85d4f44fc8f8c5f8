"""The host's copy of all weights, which bundles are loaded from: pinned memory for a GPU, a file for a CPU."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from app.domain.errors import WeightsLost
from app.gpu.device.hardware import allocating
from app.gpu.device.streams import DeviceStreams, Event
from app.gpu.kernels.linear.base import FilePlace, expect
from app.gpu.weights.arena import aligned
from app.gpu.weights.file import State, WeightFile
from app.gpu.weights.layout import Piece, WeightLayout, host_bytes
from app.machine.cores import free_from_core
from app.machine.memory import read_host_memory

_READ_BYTES = 1 << 24
"""That the thread which reads ahead reads before it looks whether the server is about to end."""
_SMALL_BYTES = 1 << 16
"""A tensor of at most so many bytes, such as a norm's weight, is copied alone."""


class PinnedStore:
    """All weights in pinned host memory. Everything is written before a bundle is loaded."""

    def __init__(self, layout: WeightLayout, streams: DeviceStreams, chunk_bytes: int) -> None:
        """One slab for everything. Raises FieldOutOfRange with both sizes if the host has not the memory."""
        parts = layout.parts()
        sizes = [part.nbytes for part in parts.values()]
        with allocating("weights_device", sum(sizes)):
            if sum(sizes) > read_host_memory().free_bytes:
                raise MemoryError("the host keeps a copy of the weights that are streamed")
            self._slab = streams.host_slab((sum(sizes),))  # it is pinned only as long as this very tensor lives
        self._memory = dict(zip(parts, self._slab.split(sizes), strict=True))
        self._views = {name: part.views(self._memory[name]) for name, part in parts.items()}
        self._layout, self._streams, self._chunk_bytes = layout, streams, chunk_bytes

    def write(self, name: str, tensors: Sequence[Tensor]) -> None:
        """A `Write`. Waits for what computes the tensors."""
        for place, tensor in zip(self._views[name], tensors, strict=True):
            place.copy_(tensor)

    def piece(self, index: int, place: int) -> Tensor:
        """A tensor of bundle `index`, where it is."""
        return self._views[f"bundle.{index}"][place]

    def load(
        self,
        index: int,
        target: Tensor,
        after: Event,
        *,
        without: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> Event:
        """Launch the copy of bundle `index` to `target` `[nbytes]` uint8 on the device, in the order of the calls; it
        begins once `after` has passed. Of its tensors those stay behind that `without` has for it, by their places.

        A GPU has one copy engine for each direction. It ends the copy that it has begun, then takes the next one of any
        stream that has one ready. So a KV move or a step's inputs, which are on other streams, wait for at most one
        chunk of weights. Long chunks cost the others time; short ones cost bandwidth.
        """
        stream = self._streams.weights
        stream.wait(after)
        left, runs, begin = without.get(index, ()), list[slice](), 0
        for place, piece in enumerate(self._layout.bundles[index].pieces):
            if place in left:
                runs.append(slice(begin, piece.offset))
                begin = piece.offset + aligned(piece.nbytes)
        chunks = [
            slice(start, min(start + self._chunk_bytes, run.stop))
            for run in (*runs, slice(begin, target.nbytes))
            for start in range(run.start, run.stop, self._chunk_bytes)
        ]
        stream.copy(target, self._memory[f"bundle.{index}"], [(chunk, chunk) for chunk in chunks])
        return stream.record()

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """Rows `ids` `[n]` int64 of a table, `[n, width]`, in host memory that copies fast. May raise IndexError."""
        [stored] = self._views[f"table.{table}"]
        rows = self._streams.host_tensor((len(ids), stored.shape[1]), stored.dtype)
        return torch.index_select(stored, 0, ids, out=rows)

    def close(self) -> None:
        """Wait for the loads that have been launched, and let go of the memory. Nothing is loaded any more."""
        self._streams.weights.record().synchronize()
        self._memory, self._views, self._slab = {}, {}, torch.empty(0)


class FileStore:
    """All weights in a file. Whatever happens to it, as far as its times show it (`WeightFile.prove`), the bytes that
    arrive are those that were stored, or `WeightsLost` is raised.

    What the system has in memory is used where it is, or copied by the threads that compute when it is waited for: they
    would wait for another thread. What has to come from the disk is read ahead by a thread that mostly sleeps.

    Bundles with experts are `sparse`: a pass needs some of their bytes, and nobody knows which before its tokens choose
    experts. Once such a bundle is proven it is always used where it is. So only experts that are visited come from the
    disk, and those that are visited often stay in the system's memory. All else of the bundle is read ahead.
    """

    def __init__(self, file: WeightFile, sparse: Mapping[int, Collection[int]] = MappingProxyType({})) -> None:
        """Takes over `file`. `sparse` are the tensors of experts, by their place in each such bundle."""
        self.file, self._sparse = file, sparse
        self._thread = ThreadPoolExecutor(1, "djinn-weights", free_from_core)
        self._read: Future[State | None] = Future()
        """The last one that the thread was given."""
        self._read.set_result(None)
        self._closed = False

    def load(self, index: int, target: Tensor, after: Event) -> FileLoad:
        """As `PinnedStore.load`, without a need of `after`. The event's `synchronize` raises `WeightsLost`."""
        name = f"bundle.{index}"
        if target.nbytes != self.file.sections[name].nbytes:
            raise ValueError(f"{name} has {self.file.sections[name].nbytes} bytes, not {target.nbytes}")
        known = index in self._sparse and self.file.is_intact(name)
        if known:
            section = self.file.sections[name]
            for place, piece in enumerate(self.file.layout.bundles[index].pieces):
                if place not in self._sparse[index]:
                    expect(self.file.fileno(), section.offset + piece.offset, piece.nbytes)
        in_memory = self._closed or known or self.file.is_cached(name)
        if not in_memory:
            self._read = self._thread.submit(self._read_ahead, name, target)
        return FileLoad(self.file, name, target, self._read, in_memory=in_memory, in_parts=known)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """As `PinnedStore.rows`. Raises `WeightsLost` too."""
        name, stored = f"table.{table}", self.file.layout.tables[table]
        count, width = stored.shape
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise IndexError(f"{name} has {count} rows")
        rows = torch.empty(len(ids), width, dtype=stored.dtype)
        before, memory, row_bytes = self.file.state(), host_bytes(rows), width * stored.dtype.itemsize
        for place, row in enumerate(ids.tolist()):
            part = memory[place * row_bytes : (place + 1) * row_bytes]
            self.file.read(name, row * row_bytes, part, scattered=True)
        if not self.file.is_proven(name, before):
            self._gather_from_all(name, ids.tolist(), memory, row_bytes)
        return rows

    def close(self) -> None:
        """Nothing is loaded any more."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)
        self.file.close()

    def _read_ahead(self, name: str, target: Tensor) -> State | None:
        """Fill `target`; returns the file's state before that."""
        before, memory = self.file.state(), host_bytes(target)
        for start in range(0, len(memory), _READ_BYTES):
            if self._closed:
                raise self.file.lost(name, "the file is closed")
            self.file.read(name, start, memory[start : start + _READ_BYTES])
        return before

    def _gather_from_all(self, name: str, ids: Sequence[int], memory: memoryview, row_bytes: int) -> None:
        """Pick the rows out of the whole table as it is read for its checksum, which proves them."""
        before, checksum = self.file.state(), 0
        for start, part in self.file.parts(name):
            checksum = zlib.crc32(part, checksum)
            for place, row in enumerate(ids):
                first, end = max(row * row_bytes, start), min((row + 1) * row_bytes, start + len(part))
                if first < end:
                    offset = (place - row) * row_bytes  # from a byte's place in the table to that in `memory`
                    memory[first + offset : end + offset] = part[first - start : end - start]
        self.file.prove(name, checksum, before)


BundleStore = PinnedStore | FileStore
"""Every bundle and table of a model, complete before the first is loaded."""


class FileLoad:
    """An `Event`: a bundle of the file, on its way to `target`. If the system has it in memory, it is copied when it is
    first waited for, by the threads that PyTorch computes with. Until then its weights may be multiplied in the file.
    """

    def __init__(
        self,
        file: WeightFile,
        name: str,
        target: Tensor,
        read: Future[State | None],
        *,
        in_memory: bool,
        in_parts: bool = False,
    ) -> None:
        """`read` is what fills `target`; of a bundle that is `in_memory`, the last one that may still write there. One
        that is needed `in_parts` is never brought whole for one of its tensors.
        """
        self._file, self._name, self._target = file, name, target
        self._read, self._in_memory = read, in_memory
        self._done, self._in_parts = False, in_parts

    def query(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        """Wait until the bundle is there and has been compared with its checksum. Raises `WeightsLost`."""
        if self._done:
            return
        file, name, memory = self._file, self._name, host_bytes(self._target)
        if self._in_memory:
            from app.gpu.kernels.linear.panels import read_on_torch_threads  # imports Numba, which only a CPU needs

            self._wait_for_others()
            before = file.state()
            if not read_on_torch_threads(file.fileno(), file.sections[name].offset, self._target):
                file.read(name, 0, memory)
        else:
            try:
                before = self._read.result()
            except CancelledError:
                raise file.lost(name, "the file is closed") from None
        if not file.is_proven(name, before):
            file.prove(name, zlib.crc32(memory), before)
        self._done = True

    def _wait_for_others(self) -> None:
        """Until the thread, which may have been given the same place before, does not write there any more."""
        with suppress(CancelledError, WeightsLost):
            self._read.result()

    def is_intact(self) -> bool:
        """Whether it is used in the file, and what has been read of it there until now is what was stored."""
        return self._in_memory and self._file.is_intact(self._name)

    def place(self, piece: Piece) -> FilePlace:
        """One of its tensors, in the file."""
        offset = self._file.sections[self._name].offset + piece.offset
        return FilePlace(self._file.fileno(), offset, piece.nbytes, self.is_intact, partial(self._bring, piece))

    def _bring(self, piece: Piece) -> Tensor:
        """Bring the tensor to its place: it alone if it is small or parts are needed, else all of the bundle. Raises
        `WeightsLost`.
        """
        tensor = piece.view(self._target)
        if (self._in_parts or tensor.nbytes <= _SMALL_BYTES) and not self._done:
            self._wait_for_others()
            self._file.read(self._name, piece.offset, host_bytes(tensor))
            if self.is_intact():
                return tensor
        self.synchronize()
        return tensor
