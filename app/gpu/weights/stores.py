"""The host's copy of all weights, which bundles are loaded from: pinned memory for a GPU, a file for a CPU."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from app.domain.errors import WeightsLost
from app.gpu.device.memory import allocating
from app.gpu.device.streams import DeviceStreams, Event
from app.gpu.weights.file import WeightFile
from app.gpu.weights.layout import Piece, WeightLayout, host_bytes
from app.machine.cores import free_from_core
from app.machine.memory import read_host_memory

CLOSED = "the server is about to end: no weights are loaded any more"
_SMALL_BYTES = 1 << 16
"""A tensor of at most so many bytes, such as a norm's weight, is copied alone."""


def chunks(nbytes: int, chunk_bytes: int) -> list[slice]:
    """The bytes of a bundle in runs of at most `chunk_bytes`, each of which is one copy.

    A GPU has one copy engine for each direction. It ends the copy that it has begun, then takes the next one of any
    stream that has one ready. So a KV move or a step's inputs, which are on other streams, wait for at most one chunk
    of weights, not for all bundles that have been ordered. Long chunks cost the others time; short ones cost bandwidth.
    """
    return [slice(start, min(start + chunk_bytes, nbytes)) for start in range(0, nbytes, chunk_bytes)]


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
        self._streams = streams
        self._chunk_bytes = chunk_bytes

    def write(self, name: str, tensors: Sequence[Tensor]) -> None:
        """A `Write`. Waits for what computes the tensors."""
        for place, tensor in zip(self._views[name], tensors, strict=True):
            place.copy_(tensor)

    def load(self, index: int, target: Tensor, after: Sequence[Event]) -> Event:
        """Launch the copy of bundle `index` to `target` `[nbytes]` uint8 on the device, in the order of the calls; it
        begins once every event of `after` has passed. Returns at once.
        """
        stream = self._streams.weights
        for event in after:
            stream.wait(event)
        runs = [(chunk, chunk) for chunk in chunks(target.nbytes, self._chunk_bytes)]
        stream.copy(target, self._memory[f"bundle.{index}"], runs)
        return stream.record()

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """Rows `ids` `[n]` int64 (host memory) of a table, `[n, width]`, in host memory that copies fast to the device.
        Raises IndexError for a row that the table has not.
        """
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

    What the system has in memory is used where it is, or copied by the threads that compute when it is waited for:
    another thread would take turns with them, and they would wait for each other. What has to come from the disk first
    is read ahead by a thread that does nothing else, without the GIL; it mostly sleeps.
    """

    def __init__(self, file: WeightFile, chunk_bytes: int) -> None:
        """Takes over `file`. A read of the thread looks after each `chunk_bytes` whether the store is closed."""
        self.file = file
        self.chunk_bytes = chunk_bytes
        self.closed = threading.Event()
        self.thread = ThreadPoolExecutor(1, "djinn-weights", free_from_core)

    def load(self, index: int, target: Tensor, after: Sequence[Event]) -> FileLoad:
        """As `PinnedStore.load`. The thread that calls this is the only one that may wait for the event.

        The event's `synchronize` raises `WeightsLost` if the bundle cannot be read or is not what was stored.
        """
        name = f"bundle.{index}"
        if target.nbytes != self.file.sections[name].nbytes:
            raise ValueError(f"{name} has {self.file.sections[name].nbytes} bytes, not {target.nbytes}")
        return FileLoad(self, name, target, guards_of(after))

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """As `PinnedStore.rows`. Raises `WeightsLost` too."""
        name, stored = f"table.{table}", self.file.layout.tables[table]
        count, width = stored.shape
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise IndexError(f"{name} has {count} rows")
        rows = torch.empty(len(ids), width, dtype=stored.dtype)
        self.require_open()
        before, memory, row_bytes = self.file.state(), host_bytes(rows), width * stored.dtype.itemsize
        for place, row in enumerate(ids.tolist()):
            part = memory[place * row_bytes : (place + 1) * row_bytes]
            self.file.read(name, row * row_bytes, part, scattered=True)
        if not self.file.is_proven(name, before):
            self._gather_from_all(name, ids.tolist(), memory, row_bytes)
        return rows

    def require_open(self) -> None:
        """Raise `WeightsLost` if the store is closed."""
        if self.closed.is_set():
            raise WeightsLost(CLOSED)

    def close(self) -> None:
        """A read that has begun ends at its next chunk; loads that wait end unread. Nothing is loaded any more."""
        self.closed.set()
        self.thread.shutdown(cancel_futures=True)
        self.file.close()

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
    """An `Event`: a bundle on its way from the file to `target`. The store's thread reads it from the disk. If the
    system has it in memory, the thread that waits for it makes the copy, with those that PyTorch computes with.

    In the second case its weights may also be multiplied in the file, without a copy: see `tensor`.
    """

    def __init__(self, store: FileStore, name: str, target: Tensor, after: Sequence[Event]) -> None:
        """`target` may be written to once every event of `after` has passed."""
        self._store, self._file, self._part = store, store.file, store.file.sections[name]
        self._name, self._target, self._after = name, target, after
        self._in_memory = not store.closed.is_set() and store.file.is_cached(name)
        self._done: Future[None] = Future()
        if not self._in_memory:
            try:
                self._done = store.thread.submit(self._load)
            except RuntimeError:
                if not store.closed.is_set():
                    raise
                self._done.cancel()

    def query(self) -> bool:
        """As `Event.query`. A load that has failed has passed too: it does nothing any more."""
        return self._done.done()

    def synchronize(self) -> None:
        """As `Event.synchronize`. Raises `WeightsLost`."""
        if self._in_memory and not self._done.done():
            try:
                self._load()
            except WeightsLost as error:
                self._done.set_exception(error)
            else:
                self._done.set_result(None)
        try:
            self._done.result()
        except CancelledError:
            raise WeightsLost(CLOSED) from None

    def guards(self) -> Sequence[Event]:
        """What must pass before its place is written to, if it is not waited for any more: a copy that has not been
        made by now never will be.
        """
        return [event for event in self._after if not event.query()] if self._in_memory else [self]

    def is_intact(self) -> bool:
        """Whether it is used in the file, and what has been read of it there until now is what was stored."""
        return self._in_memory and not self._store.closed.is_set() and self._file.is_intact(self._name)

    def tensor(self, piece: Piece) -> CachedTensor:
        """One of its tensors."""
        return CachedTensor(self, piece, self._file.fileno(), self._part.offset + piece.offset)

    def bring(self, piece: Piece) -> Tensor:
        """The tensor in its place, where its bytes are now: its own alone, if they are few and as they were stored, or
        all of the bundle. Raises `WeightsLost`.
        """
        tensor = piece.view(self._target)
        if tensor.nbytes <= _SMALL_BYTES and not self._done.done() and not self._store.closed.is_set():
            wait_for(self._after)
            self._file.read(self._name, piece.offset, host_bytes(tensor))
            if self.is_intact():
                return tensor
        self.synchronize()
        return tensor

    def _load(self) -> None:
        """Fill `target`: on the store's thread, or on the one that waits and those that PyTorch computes with."""
        wait_for(self._after)
        self._after = ()  # each has those before it: a chain of all loads since the start
        self._store.require_open()
        file, memory, before = self._file, host_bytes(self._target), self._file.state()
        if not (self._in_memory and _read_on_torch_threads(file.fileno(), self._part.offset, self._target)):
            for chunk in chunks(len(memory), self._store.chunk_bytes):
                self._store.require_open()
                file.read(self._name, chunk.start, memory[chunk])
        if not file.is_proven(self._name, before):
            file.prove(self._name, zlib.crc32(memory), before)


def _read_on_torch_threads(file: int, offset: int, target: Tensor) -> bool:
    from app.gpu.kernels.linear.cpu.products import read_on_torch_threads

    return read_on_torch_threads(file, offset, target)


@dataclass(slots=True)
class CachedTensor:
    """A `FilePlace`: a tensor of a bundle that is used in the file."""

    bundle: FileLoad
    piece: Piece
    file: int
    offset: int

    def is_intact(self) -> bool:
        return self.bundle.is_intact()

    def bring(self) -> Tensor:
        return self.bundle.bring(self.piece)


def guards_of(events: Iterable[Event]) -> list[Event]:
    """What must pass before another load writes where those of the events write, or would have written."""
    return [guard for event in events for guard in (event.guards() if isinstance(event, FileLoad) else [event])]


def wait_for(events: Iterable[Event]) -> None:
    """Wait until nothing that these events stand for reads or writes any more."""
    for event in events:
        with suppress(WeightsLost):  # what has failed does not write either
            event.synchronize()
