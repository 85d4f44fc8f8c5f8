"""Weights of which the device holds a part. Each other bundle is brought to a ring before a pass uses it: the ring is
kept full of the bundles that come next, of this pass and then of the next. On a CPU a bundle may be used where it is,
in the host's file.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from app.domain.errors import WeightsLost
from app.domain.memory_map import TextUse
from app.gpu.device.streams import PASSED, DeviceStreams, Event
from app.gpu.kernels.linear.base import MakeLinear, Weight
from app.gpu.kernels.linear.matrix import Matrix, numbers_of, stored_rows
from app.gpu.weights.arena import Place
from app.gpu.weights.layout import BundleLayout, Piece, WeightLayout, Write
from app.gpu.weights.resident import Bundle, Table
from app.gpu.weights.stores import BundleStore, FileLoad, guards_of, wait_for

logger = logging.getLogger(__name__)

Guard = TypeVar("Guard")
"""What tells that the last use of a place has ended, such as an event of the device."""
_HERE = nullcontext()


class Ring(Generic[Guard]):
    """Which bytes of a ring are in use, and which must not be written before a guard has passed.

    Places are given out one after the other round and round, and again once their holder has let go. A place is one run
    of bytes: where the rest up to the ring's end is too short for it, the rest is skipped. Places are aligned as their
    sizes are, and those of bundles are multiples of the alignment.
    """

    def __init__(self, size: int) -> None:
        """A ring of `size` bytes, all free."""
        self.size = size
        self._next = 0
        """Where the next place begins, if it ends within the ring."""
        self._in_use: set[Place] = set()
        self._released: list[tuple[Place, Guard]] = []
        """Never more than the ring has ends of places, however long it turns: a place replaces what ends within it."""

    def reserve(self, size: int) -> tuple[Place, list[Guard]] | None:
        """The next place of `size` bytes, and the guards that must pass before it is written; from now on it is in use.

        None until something is released: reuse is first in, first out, so a place in use is never passed by. If
        nothing is in use there is always room. Raises ValueError unless `size` is positive and at most the ring's.
        """
        if not 0 < size <= self.size:
            raise ValueError(f"{size} bytes asked of a ring of {self.size} bytes")
        wraps = self._next + size > self.size
        skipped = Place(self._next, self.size if wraps else self._next)
        start = 0 if wraps else self._next
        place = Place(start, start + size)
        if any(held.touches(place) or held.touches(skipped) for held in self._in_use):
            return None
        self._in_use.add(place)
        self._next = place.end
        guards = [guard for released, guard in self._released if released.touches(place)]
        # What lies behind the place still needs its guard; nothing lies before it, where the last place ended.
        self._released = [each for each in self._released if each[0].end > place.end or not each[0].touches(place)]
        return place, guards

    def release(self, place: Place, guard: Guard) -> None:
        """Let the ring have a place again, in any order; the next user of a part waits for `guard`."""
        if place not in self._in_use:
            raise RuntimeError(f"{place} is released, but it is not in use")
        self._in_use.remove(place)
        self._released.append((place, guard))


@dataclass(frozen=True, slots=True)
class Flight:
    """A bundle on its way to its place in the ring, or there: `memory`, `[nbytes]` uint8."""

    index: int
    place: Place
    memory: Tensor
    loaded: Event


class LoadAhead:
    """Loads bundles in the order in which passes use them, as far ahead as the ring has room.

    A pass may begin or end at any bundle. A bundle that is taken out of turn is loaded then, and what is in the ring
    before it is given up: the next pass is expected to be a whole one, and the price of being wrong is one load.
    """

    def __init__(self, sizes: Sequence[int], store: BundleStore) -> None:
        """`sizes` are those of all bundles that `store` holds."""
        self._sizes = sizes
        self._store = store
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.ring: Ring[Event] = Ring(0)
        self._order: list[int] = []
        """Bundles that are streamed."""
        self._flights: deque[Flight] = deque()
        self._next = 0
        """Where in `order` the bundle is that is loaded next."""
        self.loaded_bytes = 0
        """Of all bundles that passes have used since the start."""

    def turn(self, memory: Tensor, order: Sequence[int]) -> None:
        """Begin to load the bundles of `order` into a ring in `memory`, `[bytes]` uint8 on the device."""
        self._memory, self.ring = memory, Ring(memory.numel())
        self.reorder(order)

    def stop(self) -> None:
        """Wait for all that has been launched, whether it will be used or not, and let go of the ring."""
        wait_for(guards_of(flight.loaded for flight in self._flights))
        self._flights.clear()
        self.turn(self._memory.new_empty(0), ())

    def reorder(self, order: Sequence[int]) -> None:
        """Load the bundles of `order` from now on; the next pass is expected to begin with the first.

        Those that have been loaded as that pass will use them stay.
        """
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
        flight = self._flights.popleft()
        self.loaded_bytes += flight.memory.nbytes
        return flight

    def give_back(self, flight: Flight, used: Event) -> None:
        """Let the ring have the place again, once `used` has passed."""
        self.ring.release(flight.place, used)
        self._fill()

    def _fill(self) -> None:
        """Launch loads until the ring is full."""
        while len(self._flights) < len(self._order):
            index = self._order[self._next]
            room = self.ring.reserve(self._sizes[index])
            if room is None:
                return
            place, guards = room
            memory = self._memory[place.start : place.end]
            self._flights.append(Flight(index, place, memory, self._store.load(index, memory, guards)))
            self._next = (self._next + 1) % len(self._order)

    def _give_up(self, flight: Flight) -> None:
        self.ring.release(flight.place, flight.loaded)


class StreamedWeights:
    """See `Weights`. The model is built once, from tensors on `meta`, which gives the layout; what they hold comes from
    a store, once there is one and the weights have a place.

    A model that is built from real tensors for a `write` fills a store, and computes nothing.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, linear: MakeLinear, write: Write | None = None
    ) -> None:
        """`linear` makes layers whose weights come and go: it decides how those are laid out. Each part is given to
        `write` once it is complete, and not kept.
        """
        self.device, self.dtype = device, dtype
        self.layout = WeightLayout()
        self.make_linear, self._write = linear, write
        self._weights: list[list[Weight]] = []
        self._places: Mapping[int, Place] = {}
        self._kept: set[int] = set()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._store: BundleStore
        self._streams: DeviceStreams
        self._ahead: LoadAhead

    @contextmanager
    def bundle(self) -> Iterator[Bundle]:
        bundle, index = Bundle(self.make_linear), len(self._weights)
        yield bundle
        tensors = [weight.tensor for weight in bundle.weights]
        self._weights.append(bundle.weights)
        self.layout.bundles.append(BundleLayout.of(tensors))
        if self._write is not None:
            self._write(f"bundle.{index}", tensors)
        self._unbind(index)

    def table(self, matrix: Matrix) -> Table:
        """See `Weights.table`. Rows come from the host: a pass needs so few that keeping them all here would not pay.
        The host must know their ids; a pass has just been given them, so they are soon there.
        """
        number, rows = len(self.layout.tables), stored_rows(matrix)
        self.layout.tables.append(Piece(tuple(rows.shape), rows.dtype, 0))
        if self._write is not None:
            self._write(f"table.{number}", [rows])

        def look_up(ids: Tensor) -> Tensor:
            found = numbers_of(matrix, self._store.rows(number, ids.cpu()))
            return found.to(self.device, non_blocking=True).to(self.dtype)

        return look_up

    def using(self, index: int) -> AbstractContextManager[None]:
        return _HERE if index in self._kept else self._bring(index)

    @contextmanager
    def _bring(self, index: int) -> Iterator[None]:
        """The context in which a bundle that is streamed is on the device. Raises `WeightsLost`."""
        flight = self._ahead.take(index)
        loaded = flight.loaded
        try:
            if isinstance(loaded, FileLoad) and loaded.is_intact():  # compute finds it in the host's file
                for weight, piece in zip(self._weights[index], self.layout.bundles[index].pieces, strict=True):
                    weight.place = loaded.tensor(piece)
            else:
                self._streams.compute.wait(loaded)
                self._bind(index, flight.memory)
        except BaseException:
            self._ahead.give_back(flight, PASSED)
            raise
        try:
            yield
        finally:
            self._unbind(index)
            # A bundle that was used in the file may not have waited for the loads before it.
            self._ahead.give_back(flight, loaded if isinstance(loaded, FileLoad) else self._streams.compute.record())

    def stream_from(self, store: BundleStore, streams: DeviceStreams) -> None:
        """The model is complete, and `store` has what the layout says. `place` comes next."""
        self._store, self._streams = store, streams
        self._ahead = LoadAhead([bundle.nbytes for bundle in self.layout.bundles], store)

    def place(self, memory: Tensor, places: Mapping[int, Place], ring: Place) -> None:
        """Give the weights their memory, `[bytes]` uint8 zeros on the device: a place for each bundle that is kept, and
        one for the ring. Waits for those that are kept; raises `WeightsLost`.
        """
        self._memory, self._places = memory, places
        self._streams.weights.wait(self._streams.compute.record())  # for the zeros
        loads = {index: self._store.load(index, self._part(index), ()) for index in places}
        for index, loaded in loads.items():
            loaded.synchronize()
            self._keep(index)
        self._ahead.turn(memory[ring.start : ring.end], self._streamed())

    def vacate(self) -> None:
        """Let go of the memory. Nothing is computed until there is another place."""
        self._ahead.stop()
        for index in self._kept:
            self._unbind(index)
        self._kept.clear()
        self._memory = self._memory.new_empty(0)

    def lend(self, bundle: int) -> None:
        """See `Lender.lend`."""
        self._part(bundle).zero_()  # KV that has not been computed is multiplied by 0
        if bundle not in self._kept:  # it could not be taken back the last time
            return
        self._kept.remove(bundle)
        self._unbind(bundle)
        self._ahead.reorder(self._streamed())

    def take_back(self, bundle: int) -> None:
        """See `Lender.take_back`. A bundle that cannot be loaded is streamed, and its users get the reason."""
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
        kept = sum(self.layout.bundles[index].nbytes for index in self._kept)
        return TextUse(total, kept, self._ahead.ring.size, self._ahead.loaded_bytes)

    def close(self) -> None:
        """Let go of the device's memory and of the host's copy."""
        self._store.close()
        self.vacate()

    def _bind(self, index: int, memory: Tensor) -> None:
        """Let the bundle's weights be those that lie in `memory`."""
        for weight, tensor in zip(self._weights[index], self.layout.bundles[index].views(memory), strict=True):
            weight.tensor = tensor

    def _unbind(self, index: int) -> None:
        """Let the bundle's weights be nowhere: computing with them out of turn fails."""
        for weight in self._weights[index]:
            del weight.tensor

    def _keep(self, index: int) -> None:
        self._bind(index, self._part(index))
        self._kept.add(index)

    def _part(self, index: int) -> Tensor:
        place = self._places[index]
        return self._memory[place.start : place.end]

    def _streamed(self) -> list[int]:
        return [index for index in range(len(self.layout.bundles)) if index not in self._kept]
