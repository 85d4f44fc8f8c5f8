"""Sessions whose KV goes on from the host: to a file, or to another server."""

from collections.abc import Callable

from app.domain.values import Tier
from app.gpu.kv.placement import Placement
from app.gpu.state.sequence import TokenSequence


class HostBound:
    """Brings KV to the host, and then has done what waits for that."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._waiting: list[tuple[TokenSequence, bool, Callable[[], None]]] = []

    def then(self, sequence: TokenSequence, act: Callable[[], None], *, make_room: bool = False) -> None:
        """Call `act` when the host has as much of the session's KV as it can get. With `make_room` other sessions give
        way to it there.
        """
        self._waiting.append((sequence, make_room, act))
        self.go_on()

    def go_on(self) -> None:
        """Look again at those that wait: a move has ended."""
        for entry in tuple(self._waiting):
            sequence, make_room, act = entry
            if self._is_there(sequence, make_room):
                self._waiting.remove(entry)
                act()

    def _is_there(self, sequence: TokenSequence, make_room: bool) -> bool:
        """Whether there is nothing to wait for; if there is, it is on its way."""
        if sequence.busy:
            return True
        if sequence.tier is Tier.DISK:
            needed = sequence.disk_blocks
        elif sequence.tier is Tier.DEVICE and len(sequence.host_blocks) < self._whole(sequence):
            needed = self._whole(sequence) - len(sequence.host_blocks)
        else:
            return sequence.moving in (None, Tier.TO_DISK)
        if self._begin(sequence) or (make_room and self._placement.make_host_room(needed, sequence)):
            return not self._begin(sequence) or (sequence.tier is Tier.DEVICE and sequence.outgoing is None)
        return not (make_room and self._placement.host_is_emptying)

    def _begin(self, sequence: TokenSequence) -> bool:
        """Begin to bring the KV, or go on with that. False: the host has no room."""
        if sequence.tier is Tier.DEVICE:
            return self._tiers.copy_out(sequence, self._whole(sequence))
        return sequence.tier is not Tier.DISK or self._tiers.load(sequence)

    def _whole(self, sequence: TokenSequence) -> int:
        """Blocks of whole passes."""
        return self._tiers.cache.pool.blocks_for(sequence.computed)
