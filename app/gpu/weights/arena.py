"""Which weights stay on the device, decided before any is loaded, and where those and KV lie.

The device has one run of memory that KV and streamed weights share:

| KV blocks | kept bundles, the first to be lent at the bottom | kept bundles that are never lent | ring |
          --> KV grows over bundles that are lent
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from app.domain.errors import FieldOutOfRange
from app.machine.files import size

ALIGNMENT = 256
"""Bytes that bundles and their tensors begin at multiples of: enough for every vector load, and a divisor of a page."""
SLOTS = 2
"""Largest bundles that the ring holds: one in use, one on its way. A third would let copies go on for one more copy's
time once a sweep, between two passes. To keep a bundle more on the device saves as much, where a bundle is copied for
twice as long as it computes. Where both take as long a third slot gains a few percent.
"""
SMALL_SHARE = 64
"""A bundle smaller than the largest by this factor costs a copy's start and saves no memory to speak of."""


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The device's share of the weights: bundles that are kept, and a ring that the others pass through."""

    kept: frozenset[int]
    ring_bytes: int
    sizes: tuple[int, ...]
    """Bytes of every bundle, kept or not."""
    from_disk: bool = False

    @property
    def kept_bytes(self) -> int:
        """Bytes that the bundles take which are kept."""
        return sum(self.sizes[index] for index in self.kept)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that one pass through all layers brings to the device."""
        return sum(self.sizes) - self.kept_bytes

    @property
    def device_bytes(self) -> int:
        """All that the weights take on the device."""
        return self.kept_bytes + self.ring_bytes


def plan_weights(sizes: Sequence[int], budget: int, *, from_disk: bool = False) -> WeightPlan:
    """What to do with bundles of `sizes` bytes, in the order in which a pass uses them, given `budget` bytes. Raises
    `FieldOutOfRange` if the ring does not fit.

    If they do not all fit there is a ring of `SLOTS` times the largest; what is left keeps bundles, small ones first,
    the others spread evenly over the pass. So copies go on while a kept bundle computes: were those all in a row, the
    ring would be full before the first was done, and empty soon after the last. `from_disk` a copy takes far longer
    than a bundle computes, and a disk is fastest from first to last: then the first bundles are kept. Measured with a
    135M Llama in float32, a sixth of it kept, and the page cache dropped: 201 ms a pass, 236 with gaps.
    """
    total, largest = sum(sizes), max(sizes, default=0)
    if total <= budget:
        return WeightPlan(frozenset(range(len(sizes))), 0, tuple(sizes))
    ring = SLOTS * largest
    if ring > budget:
        raise FieldOutOfRange(
            f"weights_device is {_exactly(budget)}; streaming needs {_exactly(ring)}, {SLOTS} times the largest "
            f"bundle of {_exactly(largest)}, and keeping all weights on the device {_exactly(total)}",
            param="weights_device",
        )
    choose, small = _first if from_disk else _spread, _small(sizes)
    kept = choose(sizes, small, budget - ring)
    room = budget - ring - sum(sizes[index] for index in kept)
    return WeightPlan(kept | choose(sizes, set(range(len(sizes))) - small, room), ring, tuple(sizes), from_disk)


def _small(sizes: Sequence[int]) -> frozenset[int]:
    """Bundles that are not worth a copy of their own, such as a norm beside layers."""
    largest = max(sizes, default=0)
    return frozenset(index for index, size in enumerate(sizes) if size * SMALL_SHARE <= largest)


def _first(sizes: Sequence[int], among: Iterable[int], room: int) -> frozenset[int]:
    """The first bundles of `among`, as many as fit into `room` bytes."""
    candidates = sorted(among)
    ends = accumulate(sizes[index] for index in candidates)
    return frozenset(index for index, end in zip(candidates, ends, strict=True) if end <= room)


def _spread(sizes: Sequence[int], among: Iterable[int], room: int) -> frozenset[int]:
    """Bundles of `among` that fit into `room` bytes, spread so that at each point of a pass as large a share of the
    bytes behind it is kept as of all. So none is next to the pause between passes, which copies are to bridge.
    """
    candidates = sorted(among)
    total = sum(sizes[index] for index in candidates)
    kept: set[int] = set()
    kept_bytes = passed = 0
    for index in candidates:
        passed += sizes[index]
        fits = kept_bytes + sizes[index] <= room
        if fits and (2 * kept_bytes + sizes[index]) * total <= 2 * room * passed:
            kept.add(index)
            kept_bytes += sizes[index]
    return frozenset(kept)


def _exactly(nbytes: int) -> str:
    return f"{nbytes} bytes ({size(nbytes)})"


@dataclass(frozen=True, slots=True)
class Arena:
    """Where everything lies, in bytes from the arena's start. Block `i` of KV begins at `i * block_bytes`."""

    kv_blocks: int
    """Blocks that KV always has."""
    block_bytes: int
    places: Mapping[int, slice]
    """Bytes of the bundles that are kept."""
    lendable: tuple[int, ...]
    """Bundles that can give their memory to KV, in the order of their places from the bottom up."""
    ring: slice

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return int(self.ring.stop)

    @property
    def most_blocks(self) -> int:
        """KV blocks when everything is lent."""
        return self.blocks(len(self.lendable))

    def blocks(self, lent: int) -> int:
        """KV blocks while the first `lent` of the bundles that can be lent are."""
        return self.places[self.lendable[lent - 1]].stop // self.block_bytes if lent else self.kv_blocks


def lay_out(plan: WeightPlan, kv_blocks: int, block_bytes: int) -> Arena:
    """The arena of `kv_blocks` blocks and the weights that `plan` has on the device. Where there is no ring none can be
    lent. Those that come from a disk are lent from the last one on, so that what is streamed stays one run.
    """
    small = _small(plan.sizes)
    large = [index for index in sorted(plan.kept) if index not in small] if plan.ring_bytes else []
    lendable = large[::-1] if plan.from_disk else _thin_out(large)
    places = {}
    end = aligned(kv_blocks * block_bytes)
    for index in [*lendable, *sorted(plan.kept.difference(lendable))]:
        places[index] = slice(end, end + plan.sizes[index])
        end += plan.sizes[index]
    return Arena(kv_blocks, block_bytes, places, tuple(lendable), slice(end, end + plan.ring_bytes))


def _thin_out(bundles: list[int]) -> list[int]:
    """The bundles by their numbers' bits read backwards (van der Corput): those left are always spread about evenly."""
    digits = (len(bundles) - 1).bit_length()
    ranks = sorted(range(len(bundles)), key=lambda rank: int(f"{rank:0{digits}b}"[::-1], 2))
    return [bundles[rank] for rank in ranks]
