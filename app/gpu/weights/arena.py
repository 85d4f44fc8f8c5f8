"""The one run of device memory that KV and streamed weights share, and where the boundary between them may lie.

| KV blocks | kept bundles, the first to be lent at the bottom | kept bundles that are never lent | ring |
          --> KV grows over bundles that are lent
"""

from collections.abc import Mapping
from dataclasses import dataclass

from app.gpu.weights.alignment import aligned
from app.gpu.weights.residency import WeightPlan, small_bundles
from app.gpu.weights.ring import Place


@dataclass(frozen=True, slots=True)
class Arena:
    """Where everything lies, in bytes from the arena's start. Block `i` of KV begins at `i * block_bytes`."""

    kv_blocks: int
    """Blocks that KV always has."""
    block_bytes: int
    places: Mapping[int, Place]
    """Of the bundles that are kept."""
    lendable: tuple[int, ...]
    """Bundles that can give their memory to KV, in this order: it is that of their places, from the bottom up."""
    ring: Place

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.ring.end

    @property
    def most_blocks(self) -> int:
        """KV blocks when everything is lent."""
        return self.blocks(len(self.lendable))

    def blocks(self, lent: int) -> int:
        """KV blocks while the first `lent` of the bundles that can be lent are."""
        return self.places[self.lendable[lent - 1]].end // self.block_bytes if lent else self.kv_blocks


def lay_out(plan: WeightPlan, kv_blocks: int, block_bytes: int) -> Arena:
    """The arena of `kv_blocks` blocks and the weights that `plan` has on the device.

    Lent bundles are streamed, so where there is no ring none can be lent; small ones are not worth it. Those that come
    from a disk are lent from the last one on, so that what is streamed stays one run.
    """
    small = small_bundles(plan.sizes)
    large = [index for index in sorted(plan.kept) if index not in small] if plan.ring_bytes else []
    lendable = large[::-1] if plan.from_disk else _thin_out(large)
    places = {}
    end = aligned(kv_blocks * block_bytes)
    for index in [*lendable, *sorted(plan.kept.difference(lendable))]:
        places[index] = Place(end, end + plan.sizes[index])
        end += plan.sizes[index]
    return Arena(kv_blocks, block_bytes, places, tuple(lendable), Place(end, end + plan.ring_bytes))


def _thin_out(bundles: list[int]) -> list[int]:
    """The order in which to take bundles so that those that are left are always spread about evenly over a pass: that
    of their numbers' bits read backwards (van der Corput).
    """
    digits = (len(bundles) - 1).bit_length()
    ranks = sorted(range(len(bundles)), key=lambda rank: int(f"{rank:0{digits}b}"[::-1], 2))
    return [bundles[rank] for rank in ranks]
