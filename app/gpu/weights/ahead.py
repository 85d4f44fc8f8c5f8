"""Loading ahead of use: the ring is kept full of the bundles that come next, of this pass and then of the next."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from app.gpu.device.streams import Event
from app.gpu.weights.cached_bundle import guards_of, wait_for
from app.gpu.weights.ring import Place, Ring
from app.gpu.weights.store import BundleStore


@dataclass(frozen=True, slots=True)
class Flight:
    """A bundle on its way to its place in the ring, or there."""

    index: int
    place: Place
    loaded: Event


class LoadAhead:
    """Loads bundles in the order in which passes use them, as far ahead as the ring has room.

    A pass may begin or end at any bundle. One that is asked for out of turn is loaded then, and what is in the ring
    before it is given up: the next pass is expected to be a whole one, and the price of being wrong is one load.
    """

    def __init__(self, sizes: Sequence[int], store: BundleStore) -> None:
        """`sizes` are those of all bundles that `store` holds."""
        self._sizes = sizes
        self._store = store
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._ring: Ring[Event] = Ring(0)
        self._order: list[int] = []
        """Bundles that are streamed."""
        self._flights: deque[Flight] = deque()
        self._next = 0
        """Where in `order` the bundle is that is loaded next."""
        self.loaded_bytes = 0
        """Of all bundles that passes have used since the start."""

    @property
    def ring_bytes(self) -> int:
        """The ring's size."""
        return self._ring.size

    def turn(self, memory: Tensor, order: Sequence[int]) -> None:
        """Begin to load the bundles of `order` into a ring in `memory`, `[bytes]` uint8 on the device."""
        self._memory, self._ring = memory, Ring(memory.numel())
        self.reorder(order)

    def stop(self) -> None:
        """Wait for all that has been launched, whether anybody will use it or not, and let go of the ring."""
        wait_for(guards_of(flight.loaded for flight in self._flights))
        self._flights.clear()
        self._ring = Ring(0)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reorder(self, order: Sequence[int]) -> None:
        """Load the bundles of `order` from now on; the next pass is expected to begin with the first.

        Those that have been loaded as that pass will use them stay.
        """
        self._order = list(order)
        fitting = sum(1 for _ in takewhile(_agree, zip(self._flights, order, strict=False)))
        while len(self._flights) > fitting:
            self._give_up(self._flights.pop())
        self._next = fitting % max(1, len(order))
        self.fill()

    def fill(self) -> None:
        """Launch loads until the ring is full."""
        while len(self._flights) < len(self._order):
            index = self._order[self._next]
            room = self._ring.reserve(self._sizes[index])
            if room is None:
                return
            place, guards = room
            loaded = self._store.load(index, self._memory[place.start : place.end], guards)
            self._flights.append(Flight(index, place, loaded))
            self._next = (self._next + 1) % len(self._order)

    def take(self, index: int) -> Flight:
        """The flight of a bundle that is streamed; the caller waits for `loaded`, and gives it back after use."""
        while self._flights and self._flights[0].index != index:
            self._give_up(self._flights.popleft())
        if not self._flights:
            self._next = self._order.index(index)
            self.fill()
        self.loaded_bytes += self._sizes[index]
        return self._flights.popleft()

    def memory(self, flight: Flight) -> Tensor:
        """Where the bundle is, `[nbytes]` uint8."""
        return self._memory[flight.place.start : flight.place.end]

    def give_back(self, flight: Flight, used: Event) -> None:
        """Let the ring have the place again, once `used` has passed."""
        self._ring.release(flight.place, used)
        self.fill()

    def _give_up(self, flight: Flight) -> None:
        self._ring.release(flight.place, flight.loaded)


def _agree(pair: tuple[Flight, int]) -> bool:
    return pair[0].index == pair[1]
