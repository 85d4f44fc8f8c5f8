"""Bundles that are kept in pinned host memory: what a GPU's ring is filled from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from app.gpu.device.memory import allocating
from app.gpu.device.streams import DeviceStreams, Event
from app.gpu.weights.alignment import aligned
from app.gpu.weights.layout import BundleLayout, Piece
from app.gpu.weights.store import chunks
from app.machine.memory import read_host_memory


class PinnedStore:
    """See `BundleStore`. It is also the `Writer` that fills it: everything is written before a bundle is loaded."""

    def __init__(
        self,
        layouts: Sequence[BundleLayout],
        tables: Sequence[Piece],
        streams: DeviceStreams,
        chunk_bytes: int,
    ) -> None:
        """One slab for everything. Raises FieldOutOfRange with both sizes if the host has not the memory."""
        sizes = [layout.nbytes for layout in layouts] + [aligned(table.nbytes) for table in tables]
        self._slab = _allocate(sum(sizes), streams)  # it is pinned only as long as this very tensor lives
        places = self._slab.split(sizes)
        self._layouts = layouts
        self._bundles = places[: len(layouts)]
        self._tables = [
            memory[: table.nbytes].view(table.dtype).view(table.shape)
            for table, memory in zip(tables, places[len(layouts) :], strict=True)
        ]
        self._streams = streams
        self._chunk_bytes = chunk_bytes

    def bundle(self, index: int, tensors: Sequence[Tensor]) -> None:
        """See `Writer.bundle`. Waits for what computes them."""
        for place, tensor in zip(self._layouts[index].views(self._bundles[index]), tensors, strict=True):
            place.copy_(tensor)

    def table(self, index: int, matrix: Tensor) -> None:
        """See `Writer.table`. Waits for what computes it."""
        self._tables[index].copy_(matrix)

    def load(self, index: int, target: Tensor, after: Sequence[Event]) -> Event:
        stream = self._streams.weights
        for event in after:
            stream.wait(event)
        runs = [(chunk, chunk) for chunk in chunks(self._layouts[index].nbytes, self._chunk_bytes)]
        stream.copy(target, self._bundles[index], runs)
        return stream.record()

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """See `BundleStore.rows`. Raises IndexError for a row that the table has not."""
        stored = self._tables[table]
        rows = self._streams.host_tensor((len(ids), stored.shape[1]), stored.dtype)
        return torch.index_select(stored, 0, ids, out=rows)

    def close(self) -> None:
        """See `BundleStore.close`. Waits for the loads that have been launched."""
        self._streams.weights.record().synchronize()
        self._bundles, self._tables, self._slab = (), [], torch.empty(0)


def _allocate(nbytes: int, streams: DeviceStreams) -> Tensor:
    with allocating("weights_device", nbytes):
        if nbytes > read_host_memory().free_bytes:
            raise MemoryError("the host keeps a copy of the weights that are streamed")
        return streams.host_slab((nbytes,))
