"""Bundles that come from a file, by way of the system's page cache: what a CPU streams."""

import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import torch
from torch import Tensor

from app.domain.errors import WeightsLost
from app.gpu.device.streams import Event
from app.gpu.weights.cached_bundle import CLOSED, CachedBundle, guards_of, wait_for
from app.gpu.weights.file import BundleFile
from app.gpu.weights.header import Section
from app.gpu.weights.layout import host_bytes
from app.gpu.weights.store import chunks
from app.gpu.weights.writer import Progress
from app.machine.cores import free_from_core


def verify(file: BundleFile) -> None:
    """Read all sections, as many at a time as PyTorch has threads. Raises `WeightsLost` for one that is damaged."""

    def check(section: Section) -> int:
        before = file.state()
        file.prove(section, file.checksum(section), before)
        return section.nbytes

    progress = Progress("checked", sum(section.nbytes for section in file.sections))
    with ThreadPoolExecutor(torch.get_num_threads(), "djinn-weights-check") as pool:
        for nbytes in pool.map(check, file.sections):
            progress.add(nbytes)


class FileStore:
    """See `BundleStore`. Whatever happens to the file, as far as its times show it (`BundleFile.prove`), the bytes that
    arrive are those that were stored, or `WeightsLost` is raised.

    What the system has in memory is used where it is, or copied by the threads that compute when it is waited for: a
    thread beside them would take turns with them, and they would wait for each other. What has to come from the disk
    first is read ahead by a thread of its own, without the GIL; that one mostly sleeps.
    """

    def __init__(self, file: BundleFile, chunk_bytes: int) -> None:
        """Takes over `file`, and reads all of it once, against bytes that went bad while nobody looked: `WeightsLost`
        names the bundle and says what to do.
        """
        try:
            verify(file)
        except BaseException:
            file.close()
            raise
        self._file = file
        self._chunk_bytes = chunk_bytes
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, "djinn-weights", free_from_core)

    def load(self, index: int, target: Tensor, after: Sequence[Event]) -> Event:
        if target.nbytes != self._file.bundles[index].nbytes:
            raise ValueError(f"bundle {index} has {self._file.bundles[index].nbytes} bytes, not {target.nbytes}")
        after = guards_of(after)
        if self._is_cached(index):
            return CachedBundle(self._file, index, target, after, self._closed)
        try:
            future = self._thread.submit(self._read, index, target, after)
        except RuntimeError:
            if not self._closed.is_set():
                raise
            future = Future()
            future.cancel()
        return _Loaded(future)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """See `BundleStore.rows`. Raises IndexError for a row that the table has not."""
        stored = self._file.contents.tables[table]
        count, width = stored.shape
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise IndexError(f"table {table} has {count} rows")
        rows = torch.empty(len(ids), width, dtype=stored.dtype)
        self._check_open()
        before = self._file.state()
        self._gather(table, ids.tolist(), rows)
        if not self._file.is_proven(self._file.tables[table], before):
            self._gather_from_all(table, ids.tolist(), rows)
        return rows

    def close(self) -> None:
        """See `BundleStore.close`. A read that has begun ends at its next chunk; loads that wait end unread."""
        self._closed.set()
        self._thread.shutdown(cancel_futures=True)
        self._file.close()

    def _is_cached(self, index: int) -> bool:
        return not self._closed.is_set() and self._file.is_cached(self._file.bundles[index])

    def _read(self, index: int, target: Tensor, after: Sequence[Event]) -> None:
        """On the store's own thread."""
        wait_for(after)
        section, memory, before = self._file.bundles[index], host_bytes(target), self._file.state()
        for chunk in chunks(section.nbytes, self._chunk_bytes):
            self._check_open()
            self._file.read(section, chunk.start, memory[chunk])
        self._file.prove_copy(section, memory, before)

    def _gather(self, table: int, ids: Sequence[int], rows: Tensor) -> None:
        section, memory = self._file.tables[table], host_bytes(rows)
        row_bytes = rows.shape[1] * rows.itemsize
        for place, row in enumerate(ids):
            self._file.read_rows(section, row * row_bytes, memory[place * row_bytes : (place + 1) * row_bytes])

    def _gather_from_all(self, table: int, ids: Sequence[int], rows: Tensor) -> None:
        """Pick the rows out of the whole table as it is read for its checksum, which proves them."""
        section, before, checksum = self._file.tables[table], self._file.state(), 0
        memory, row_bytes = host_bytes(rows), rows.shape[1] * rows.itemsize
        for start, part in self._file.parts(section):
            checksum = zlib.crc32(part, checksum)
            for place, row in enumerate(ids):
                first, end = max(row * row_bytes, start), min((row + 1) * row_bytes, start + len(part))
                if first < end:
                    offset = (place - row) * row_bytes  # from a byte's place in the table to that in `memory`
                    memory[first + offset : end + offset] = part[first - start : end - start]
        self._file.prove(section, checksum, before)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise WeightsLost(CLOSED)


class _Loaded:
    """See `Event`."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def query(self) -> bool:
        """See `Event.query`. A load that has failed has passed too: it does nothing any more."""
        return self._future.done()

    def synchronize(self) -> None:
        """See `Event.synchronize`. Raises `WeightsLost`."""
        try:
            self._future.result()
        except CancelledError:
            raise WeightsLost(CLOSED) from None
