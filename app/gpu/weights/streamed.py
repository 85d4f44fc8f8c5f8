"""Weights of which the device holds a part: each bundle is brought to the ring before a pass uses it. On a CPU it may
be used where it is, in the host's file.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from app.domain.errors import WeightsLost
from app.domain.memory_map import TextUse
from app.gpu.device.streams import PASSED, DeviceStreams, Stream
from app.gpu.kernels.linear.base import MakeLinear
from app.gpu.kernels.linear.matrix import Matrix
from app.gpu.kernels.linear.weight import Weight
from app.gpu.weights.ahead import Flight, LoadAhead
from app.gpu.weights.cached_bundle import CachedBundle
from app.gpu.weights.fill import StreamedBundle
from app.gpu.weights.host_table import HostTable
from app.gpu.weights.layout import BundleLayout
from app.gpu.weights.ring import Place
from app.gpu.weights.store import BundleStore
from app.gpu.weights.text import Table

logger = logging.getLogger(__name__)

_HERE = nullcontext()


class StreamedText:
    """See `Text`. The model is built from tensors on `meta`; what they hold comes from `store`, once it has a place."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        layouts: Sequence[BundleLayout],
        store: BundleStore,
        streams: DeviceStreams,
        linear: MakeLinear,
    ) -> None:
        """`layouts` are those of all bundles that `store` holds; `linear` makes layers whose weights move."""
        self.dtype, self.device = dtype, device
        self._layouts, self._store, self._streams, self._linear = layouts, store, streams, linear
        self._weights: list[list[Weight]] = []
        self._tables = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._places: dict[int, Place] = {}
        self._kept: set[int] = set()
        self._ahead = LoadAhead([layout.nbytes for layout in layouts], store)
        self._uses = [_Use(self, index, self._ahead, streams.compute) for index in range(len(layouts))]

    @contextmanager
    def bundle(self) -> Iterator[StreamedBundle]:
        bundle = StreamedBundle(self._linear)
        yield bundle
        assert BundleLayout.of([weight.tensor for weight in bundle.weights]) == self._layouts[len(self._weights)]
        self._weights.append(bundle.weights)
        self.unbind(len(self._weights) - 1)

    def table(self, matrix: Matrix) -> Table:
        """See `Text.table`. Rows come from the host: a pass needs so few that keeping them all here would not pay."""
        self._tables += 1
        return HostTable(self._store, self._tables - 1, matrix, self.device, self.dtype)

    def using(self, index: int) -> AbstractContextManager[None]:
        return _HERE if index in self._kept else self._uses[index]

    def place(self, memory: Tensor, places: Mapping[int, Place], ring: Place) -> None:
        """Give the weights their memory, `[bytes]` uint8 zeros on the device: a place for each bundle that is kept, and
        one for the ring. Waits for those that are kept; raises `WeightsLost`.
        """
        self._memory, self._places = memory, dict(places)
        self._streams.weights.wait(self._streams.compute.record())  # for the zeros
        loads = {index: self._store.load(index, memory[place.start : place.end], ()) for index, place in places.items()}
        for index, loaded in loads.items():
            loaded.synchronize()
            self._keep(index)
        self._ahead.turn(memory[ring.start : ring.end], self._streamed())

    def vacate(self) -> None:
        """Let go of the memory. Nothing is computed until there is another place."""
        self._ahead.stop()
        for index in self._kept:
            self.unbind(index)
        self._kept.clear()
        self._memory = self._memory.new_empty(0)

    def lend(self, bundle: int) -> None:
        """See `Lender.lend`."""
        self._part(bundle).zero_()  # KV that has not been computed is multiplied by 0
        if bundle not in self._kept:  # it could not be taken back the last time
            return
        self._kept.remove(bundle)
        self.unbind(bundle)
        self._ahead.reorder(self._streamed())

    def take_back(self, bundle: int) -> None:
        """See `Lender.take_back`. One that cannot be loaded is streamed, and its users get the reason."""
        loaded = self._store.load(bundle, self._part(bundle), [self._streams.compute.record()])
        try:
            self._streams.compute.wait(loaded)
        except WeightsLost as error:
            logger.error("weights that were lent do not come back: %s", error.message)
            return
        self._keep(bundle)
        self._ahead.reorder(self._streamed())

    def use(self, total: int) -> TextUse:
        """What the weights, `total` bytes, take now."""
        kept = sum(self._layouts[index].nbytes for index in self._kept)
        return TextUse(total, kept, self._ahead.ring_bytes, self._ahead.loaded_bytes)

    def close(self) -> None:
        """Let go of the device's memory and of the host's copy."""
        self._store.close()
        self.vacate()

    def bind(self, index: int, memory: Tensor) -> None:
        """Let the bundle's weights be those that lie in `memory`."""
        for weight, tensor in zip(self._weights[index], self._layouts[index].views(memory), strict=True):
            weight.tensor = tensor

    def bind_flight(self, flight: Flight, memory: Tensor) -> None:
        """Let the bundle's weights be those on their way to `memory`: compute waits for them, or finds them in the
        host's file. Raises `WeightsLost`.
        """
        bundle = flight.loaded
        if not isinstance(bundle, CachedBundle) or not bundle.is_intact():
            self._streams.compute.wait(bundle)
            self.bind(flight.index, memory)
            return
        for weight, piece in zip(self._weights[flight.index], self._layouts[flight.index].pieces, strict=True):
            weight.place = bundle.tensor(piece)

    def unbind(self, index: int) -> None:
        """Let the bundle's weights be nowhere: computing with them out of turn fails."""
        for weight in self._weights[index]:
            del weight.tensor

    def _keep(self, index: int) -> None:
        self.bind(index, self._part(index))
        self._kept.add(index)

    def _part(self, index: int) -> Tensor:
        place = self._places[index]
        return self._memory[place.start : place.end]

    def _streamed(self) -> list[int]:
        return [index for index in range(len(self._layouts)) if index not in self._kept]


class _Use:
    """The context in which a bundle that is streamed is on the device."""

    def __init__(self, text: StreamedText, index: int, ahead: LoadAhead, compute: Stream) -> None:
        self._text, self._index, self._ahead, self._compute = text, index, ahead, compute
        self._flight: Flight

    def __enter__(self) -> None:
        self._flight = self._ahead.take(self._index)
        try:
            self._text.bind_flight(self._flight, self._ahead.memory(self._flight))
        except BaseException:
            self._ahead.give_back(self._flight, PASSED)
            raise

    def __exit__(self, *_: object) -> None:
        self._text.unbind(self._index)
        loaded = self._flight.loaded  # one that was used where it is may not have waited for those before it
        used = loaded if isinstance(loaded, CachedBundle) else self._compute.record()
        self._ahead.give_back(self._flight, used)
