"""A model's weights as the model sees them: in bundles, which are all on the device, or take turns there.

A bundle is what the device needs of the weights at once: a layer, the final norm, some rows of the output projection. A
model makes its bundles in the order in which a pass uses them, and says when it uses one.

Of `StreamedWeights` the device holds a part. Each other bundle is brought to a slot before a pass uses it, while the
one before is in use in the other slot. On a CPU a bundle may be used where it is, in the host's file.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from app.domain.errors import WeightsLost
from app.domain.memory_map import TextUse
from app.gpu.device.hardware import allocating, zeroed
from app.gpu.device.streams import PASSED, DeviceStreams, Event
from app.gpu.kernels.linear import MakeLinear, linear_maker
from app.gpu.kernels.linear.base import (
    BlockMatrix,
    HostPlace,
    Linear,
    MatmulPrecision,
    Matrix,
    Weight,
    look_up,
    numbers_of,
    stored_rows,
)
from app.gpu.weights.arena import Arena, WeightPlan, lay_out
from app.gpu.weights.layout import BundleLayout, Piece, WeightLayout, Write
from app.gpu.weights.stores import BundleStore, FileLoad, PinnedStore

logger = logging.getLogger(__name__)

Table = Callable[[Tensor], Tensor]
"""A matrix of which a pass needs some rows: `ids` `[n]` int64 on the device to `[n, width]` of the weights' dtype."""
Load = Callable[[int, Tensor, Event], Event]
"""`load` of a store."""
_HERE = nullcontext()


class Bundle:
    """One bundle while the model is built. Everything that is given to it is part of it, in this order."""

    def __init__(self, linear: MakeLinear) -> None:
        self.weights: list[Weight] = []
        """The cells of all its tensors."""
        self.visited = list[int]()
        """Those of experts: a pass needs some of their bytes alone."""
        self._make = linear

    def hold(self, tensor: Tensor) -> Weight:
        """A dense tensor that the model computes with itself, such as a norm's weight."""
        weight = Weight(tensor)
        self.weights.append(weight)
        return weight

    def linear(self, weight: Matrix, bias: Tensor | None = None, experts: int = 1) -> Linear:
        """The dense layer of `weight` `[out, in]`, as the checkpoint has it, and `bias` `[out]`. Or of so many experts,
        those of each below those of the one before.
        """
        linear, begin = self._make(weight, bias, experts), len(self.weights)
        self.weights += linear.weights
        self.visited += range(begin, len(self.weights)) if experts > 1 else ()
        return linear


class ResidentWeights:
    """The tensors of which a model is built are kept as they are, or in a layout that multiplies faster. `dtype` and
    `device` are those that the model computes in and on.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        batch_invariant: bool,
        products: MatmulPrecision = MatmulPrecision.FLOAT32,
    ) -> None:
        self.device, self.dtype = device, dtype
        self._linear = linear_maker(device, dtype, batch_invariant=batch_invariant, products=products)

    def bundle(self) -> AbstractContextManager[Bundle]:
        """The next bundle; it is complete when the context ends. The first one made has index 0."""
        return nullcontext(Bundle(lambda weight, bias, experts: self._linear(self._here(weight), bias, experts)))

    def table(self, matrix: Matrix) -> Table:
        """A table of the rows of `matrix` `[n, width]`, which are kept as the checkpoint has them."""
        here = self._here(matrix)
        return lambda ids: look_up(here, ids).to(self.dtype)

    def using(self, index: int) -> AbstractContextManager[None]:
        """Within this context the weights of bundle `index` are on the device; what is launched in it may use them. One
        bundle at a time.
        """
        return _HERE

    def _here(self, matrix: Matrix) -> Matrix:
        """The matrix on the device: blocks may have been made on the host."""
        if isinstance(matrix, BlockMatrix):
            return BlockMatrix(matrix.kind, matrix.rows.to(self.device), matrix.shape)
        return matrix


@dataclass(frozen=True, slots=True)
class Flight:
    """A bundle on its way to a slot, or there."""

    index: int
    slot: Tensor
    loaded: Event


class LoadAhead:
    """Loads bundles in the order in which passes use them, as far ahead as there are slots. A bundle that is taken out
    of turn is loaded then, and those on their way before it are given up: a pass is expected to be a whole one.
    """

    def __init__(self, sizes: Sequence[int], load: Load) -> None:
        """`sizes` are those of all bundles that `load` brings."""
        self._sizes, self._load = sizes, load
        self._free: deque[tuple[Tensor, Event]] = deque()
        """Slots, each with what must pass before it is written to."""
        self._order: list[int] = []
        """Bundles that are streamed."""
        self._flights: deque[Flight] = deque()
        self._next = 0
        """Where in `order` the bundle is that is loaded next."""
        self.ring_bytes = 0
        self.loaded_bytes = 0
        """Of all bundles that passes have used since the start."""

    def turn(self, memory: Tensor, order: Sequence[int]) -> None:
        """Begin to load the bundles of `order` into slots of `memory`, `[bytes]` uint8, that nothing writes to now."""
        self.ring_bytes = memory.numel()
        self._flights.clear()
        self._free = deque((slot, PASSED) for slot in memory.split(max(self._sizes)))
        self.reorder(order)

    def reorder(self, order: Sequence[int]) -> None:
        """Load the bundles of `order` for the next passes. Those that have been loaded in this order stay."""
        self._order, fitting = list(order), 0
        for flight, index in zip(self._flights, order, strict=False):
            if flight.index != index:
                break
            fitting += 1
        while len(self._flights) > fitting:
            self._give_up(self._flights.pop())
        self._next = fitting % max(1, len(order))
        self._fill()

    def take(self, index: int) -> Flight:
        """The flight of a bundle that is streamed; the caller waits for `loaded`, and gives it back after use."""
        while self._flights and self._flights[0].index != index:
            self._give_up(self._flights.popleft())
        if not self._flights:
            self._next = self._order.index(index)
            self._fill()
        self.loaded_bytes += self._sizes[index]
        return self._flights.popleft()

    def give_back(self, flight: Flight, used: Event) -> None:
        """Load the next bundle into the slot, once `used` has passed."""
        self._free.append((flight.slot, used))
        self._fill()

    def _give_up(self, flight: Flight) -> None:
        self._free.append((flight.slot, flight.loaded))

    def _fill(self) -> None:
        """Launch loads until every slot has its bundle."""
        while self._free and len(self._flights) < len(self._order):
            index, (slot, used) = self._order[self._next], self._free.popleft()
            loaded = self._load(index, slot[: self._sizes[index]], used)
            self._flights.append(Flight(index, slot, loaded))
            self._next = (self._next + 1) % len(self._order)


class StreamedWeights:
    """The same of weights that are streamed. The model is built once, from tensors on `meta`, which gives the layout;
    what they hold comes from a store. A model that is built from real tensors for a `write` fills a store, and computes
    nothing.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, linear: MakeLinear, write: Write | None = None
    ) -> None:
        """`linear` makes layers whose weights come and go. A part that is complete goes to `write`, and is not kept."""
        self.device, self.dtype = device, dtype
        self.layout = WeightLayout()
        self.sparse = dict[int, Collection[int]]()
        """Of bundles with experts, which tensors are those of experts."""
        self.make_linear, self._write = linear, write
        self._weights: list[list[Weight]] = []
        self._places: Mapping[int, slice] = {}
        self._kept: set[int] = set()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._store: BundleStore
        self._streams: DeviceStreams
        self._ahead: LoadAhead

    @contextmanager
    def bundle(self) -> Iterator[Bundle]:
        """As `ResidentWeights` has it."""
        bundle, index = Bundle(self.make_linear), len(self._weights)
        yield bundle
        tensors = [weight.tensor for weight in bundle.weights]
        self._weights.append(bundle.weights)
        self.layout.bundles.append(BundleLayout.of(tensors))
        if bundle.visited:
            self.sparse[index] = bundle.visited
        if self._write is not None:
            self._write(f"bundle.{index}", tensors)
        self._unbind(index)

    def table(self, matrix: Matrix) -> Table:
        """As `ResidentWeights` has it; rows come from the host: a pass needs few. The host must wait for their ids."""
        number, rows = len(self.layout.tables), stored_rows(matrix)
        self.layout.tables.append(Piece(tuple(rows.shape), rows.dtype, 0))
        if self._write is not None:
            self._write(f"table.{number}", [rows])

        def look_up(ids: Tensor) -> Tensor:
            found = numbers_of(matrix, self._store.rows(number, ids.cpu()))
            return found.to(self.device, non_blocking=True).to(self.dtype)

        return look_up

    def using(self, index: int) -> AbstractContextManager[None]:
        """As `ResidentWeights` has it. Raises `WeightsLost` if they cannot be brought; using a weight may, too."""
        return _HERE if index in self._kept else self._bring(index)

    @contextmanager
    def _bring(self, index: int) -> Iterator[None]:
        """The context in which a bundle that is streamed is on the device. Raises `WeightsLost`."""
        flight = self._ahead.take(index)
        pieces, loaded = self.layout.bundles[index].pieces, flight.loaded
        try:
            if isinstance(loaded, FileLoad) and loaded.is_intact():  # compute finds it in the host's file
                for weight, piece in zip(self._weights[index], pieces, strict=True):
                    weight.place = loaded.place(piece)
            else:
                self._streams.compute.wait(loaded)
                self._bind(index, flight.slot)
                if isinstance(self._store, PinnedStore):
                    for place in self.sparse.get(index, ()):
                        weight = self._weights[index][place]
                        target, host = weight.tensor, self._store.piece(index, place)
                        del weight.tensor
                        weight.place = HostPlace(host, partial(self._copy, host, target))
            try:
                yield
            finally:
                self._unbind(index)
        finally:
            self._ahead.give_back(flight, self._streams.compute.record())

    def stream_from(self, store: BundleStore, streams: DeviceStreams, plan: WeightPlan) -> None:
        """The model is complete, and `store` has what the layout says. `share` comes next."""
        self._store, self._streams, self.plan = store, streams, plan
        load = partial(store.load, without=self.sparse) if isinstance(store, PinnedStore) else store.load
        self._ahead = LoadAhead(plan.sizes, load)

    def share(self, kv_blocks: int, block_bytes: int) -> tuple[Arena, Tensor]:
        """Move into memory, uint8, that begins with so many blocks of KV. Raises FieldOutOfRange, `WeightsLost`."""
        arena = lay_out(self.plan, kv_blocks, block_bytes)
        self.vacate()
        larger = "kv_device" if kv_blocks * block_bytes > self.plan.device_bytes else "weights_device"
        with allocating(larger, arena.nbytes):
            memory = zeroed((arena.nbytes,), torch.uint8, self.device)
        self.place(memory, arena)
        return arena, memory

    def place(self, memory: Tensor, arena: Arena) -> None:
        """Give the weights their memory, `[bytes]` uint8 zeros. Waits for what is kept there; raises `WeightsLost`."""
        self._memory, self._places = memory, arena.places
        self._streams.weights.wait(self._streams.compute.record())  # for the zeros
        for index in arena.places:
            self._store.load(index, self._part(index), PASSED).synchronize()
            self._keep(index)
        self._ahead.turn(memory[arena.ring], self._streamed())

    def vacate(self) -> None:
        """Let go of the memory. Nothing is computed until there is another place."""
        self._streams.weights.record().synchronize()
        self._memory = self._memory.new_empty(0)
        self._ahead.turn(self._memory, ())
        for index in self._kept:
            self._unbind(index)
        self._kept.clear()

    def lend(self, bundle: int) -> None:
        """Stream a kept bundle from now on: KV has its place in all that is launched after this."""
        self._part(bundle).zero_()  # KV that has not been computed is multiplied by 0
        if bundle not in self._kept:  # it could not be taken back the last time
            return
        self._kept.remove(bundle)
        self._unbind(bundle)
        self._ahead.reorder(self._streamed())

    def take_back(self, bundle: int) -> None:
        """Keep a bundle in its place again, behind all launched work. One that cannot be loaded is streamed."""
        loaded = self._store.load(bundle, self._part(bundle), self._streams.compute.record())
        try:
            self._streams.compute.wait(loaded)
        except WeightsLost as error:
            logger.error("weights that were lent do not come back: %s", error.message)
            return
        self._keep(bundle)
        self._ahead.reorder(self._streamed())

    def use(self, total: int) -> TextUse:
        """What the weights, `total` bytes, take now."""
        kept = sum(self.layout.bundles[index].nbytes for index in self._kept)
        return TextUse(total, kept, self._ahead.ring_bytes, self._ahead.loaded_bytes)

    def close(self) -> None:
        """Let go of the device's memory and of the host's copy."""
        self._store.close()
        self.vacate()

    def _bind(self, index: int, memory: Tensor) -> None:
        """Let the bundle's weights be those that lie in `memory`."""
        for weight, tensor in zip(self._weights[index], self.layout.bundles[index].views(memory), strict=True):
            weight.tensor = tensor

    def _copy(self, host: Tensor, target: Tensor) -> Tensor:
        """Of a tensor that is to be used now."""
        self._streams.compute.copy(target, host)
        return target

    def _unbind(self, index: int) -> None:
        """Let the bundle's weights be nowhere: computing with them out of turn fails."""
        for weight in self._weights[index]:
            del weight.tensor

    def _keep(self, index: int) -> None:
        self._bind(index, self._part(index))
        self._kept.add(index)

    def _part(self, index: int) -> Tensor:
        return self._memory[self._places[index]]

    def _streamed(self) -> list[int]:
        return [index for index in range(len(self.layout.bundles)) if index not in self._kept]


Weights = ResidentWeights | StreamedWeights
"""A model's weights."""
