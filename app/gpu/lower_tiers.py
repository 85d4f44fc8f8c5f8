"""Room in host memory and on disk: which sessions' KV goes one tier down, and which is lost when there is none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from app.domain import SessionId, Tier
from app.gpu.kv_tiers import KVTiers
from app.gpu.sequence import Sequence


class LowerTiers:
    """Sessions without a turn whose KV is off the device, longest away first, and every session that has a file."""

    def __init__(self, tiers: KVTiers, disk_blocks: int) -> None:
        self.tiers = tiers
        self.disk_blocks = disk_blocks
        self.away: OrderedDict[SessionId, Sequence] = OrderedDict()
        self.files: OrderedDict[SessionId, Sequence] = OrderedDict()
        self.dropped = 0

    @property
    def disk_used(self) -> int:
        """Blocks in files."""
        return sum(sequence.disk_blocks for sequence in self.files.values())

    def make_host_room(self, needed: int, copied: Iterable[Sequence], queued: Iterable[Sequence]) -> bool:
        """Whether `needed` host blocks are available. If not, frees some, or starts to: ask again later.

        The copies of sessions that are on the device too (`copied`) go first, then the session that has been away
        longest moves to disk, and last those whose turn waits for room on the device (`queued`).
        """
        host = self.tiers.cache.host
        if needed > host.num_blocks:
            return False
        for sequence in copied:
            if host.available >= needed:
                break
            if sequence.moving is None:
                self.tiers.cache.release_copies(sequence, 0)
        saving = sum(len(s.host_blocks) for s in self.tiers.ledger.moving if s.moving is Tier.TO_DISK)
        for sequence in [*self.away.values(), *queued]:
            if host.available + saving >= needed:
                break
            if sequence.tier is Tier.HOST and self.save(sequence):
                saving += len(sequence.host_blocks) if sequence.moving is Tier.TO_DISK else 0
        return host.available >= needed

    def save(self, sequence: Sequence) -> bool:
        """Move a session from host to disk. False if it does not fit there."""
        clean = sequence.disk_tokens >= sequence.computed
        if not clean and not self._make_disk_room(len(sequence.host_blocks), sequence):
            return False
        self.tiers.save(sequence)
        self.files[sequence.session] = sequence
        self.files.move_to_end(sequence.session)
        return True

    def adopt(self, sequence: Sequence, computed: int) -> None:
        """Count a file that is there already as the session's; it goes if it does not fit."""
        self.tiers.adopt_file(sequence, computed)
        if self._make_disk_room(sequence.disk_blocks, sequence):
            self.files[sequence.session] = sequence
        else:
            self.dropped += 1
            self.tiers.drop(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The session is closed, or has lost its KV."""
        self.away.pop(sequence.session, None)
        self.files.pop(sequence.session, None)

    def _make_disk_room(self, needed: int, for_sequence: Sequence) -> bool:
        """Delete files until `needed` blocks fit: first those whose KV is elsewhere too, then the oldest."""
        if needed > self.disk_blocks:
            return False
        spare = [s for s in self.files.values() if s.tier is not Tier.DISK and s.moving is not Tier.TO_DISK]
        only = [s for s in self.files.values() if s.tier is Tier.DISK]
        used = sum(s.disk_blocks for s in self.files.values() if s is not for_sequence)
        for sequence in [*spare, *only]:
            if used + needed <= self.disk_blocks:
                break
            if sequence is for_sequence:
                continue
            used -= sequence.disk_blocks
            if sequence.tier is Tier.DISK:
                self.dropped += 1
                self.tiers.drop(sequence)
                self.away.pop(sequence.session, None)
            else:
                self.tiers.forget_file(sequence)
            self.files.pop(sequence.session)
        return used + needed <= self.disk_blocks
