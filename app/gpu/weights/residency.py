"""Which weights stay on the device and which are streamed, decided before any is loaded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from app.domain.errors import FieldOutOfRange
from app.machine.units import size

SLOTS = 2
"""Largest bundles that the ring holds: one in use, one on its way.

A third would let copies go on for one more copy's time where a pass pauses, which is once a sweep, between two passes.
The same bytes keep a bundle more on the device, which saves one copy's time in every sweep: as much or more, while a
bundle is copied for at least twice as long as it computes. Where both take as long a third slot gains a few percent.
"""
SMALL_SHARE = 64
"""A bundle smaller than the largest by this factor costs a copy's start and saves no memory to speak of."""


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
    """What to do with bundles of `sizes` bytes, in the order in which a pass uses them, given `budget` bytes.

    If they do not all fit there is a ring of `SLOTS` times the largest; what is left keeps bundles, small ones first,
    the others spread evenly over the pass. So copies go on while a kept bundle computes: were those all in a row, the
    ring would be full before the first was done, and empty soon after the last. That holds where a copy takes about as
    long as a bundle computes. `from_disk` it takes far longer, and a disk is fastest from first to last: then the first
    bundles are kept, without a gap between the others. Measured with a 135M Llama in float32, a sixth of it kept, and
    the page cache dropped all the time: 201 ms a pass, 236 with gaps.

    What is left over is less than the largest bundle. Raises `FieldOutOfRange` if the ring does not fit.
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
    choose, small = _first if from_disk else _spread, small_bundles(sizes)
    kept = choose(sizes, small, budget - ring)
    room = budget - ring - sum(sizes[index] for index in kept)
    return WeightPlan(kept | choose(sizes, set(range(len(sizes))) - small, room), ring, tuple(sizes), from_disk)


def small_bundles(sizes: Sequence[int]) -> frozenset[int]:
    """Bundles that are not worth a copy of their own, such as a norm beside layers."""
    largest = max(sizes, default=0)
    return frozenset(index for index, size in enumerate(sizes) if size * SMALL_SHARE <= largest)


def _first(sizes: Sequence[int], among: Iterable[int], room: int) -> frozenset[int]:
    """The first bundles of `among`, as many as fit into `room` bytes."""
    candidates = sorted(among)
    ends = accumulate(sizes[index] for index in candidates)
    return frozenset(index for index, end in zip(candidates, ends, strict=True) if end <= room)


def _spread(sizes: Sequence[int], among: Iterable[int], room: int) -> frozenset[int]:
    """Bundles of `among` that fit into `room` bytes, so chosen that at each point of a pass as large a share of the
    bytes behind it is kept as of all, give or take half a bundle: so the pause between two passes, which copies are
    to bridge, has no kept bundle beside it.
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
