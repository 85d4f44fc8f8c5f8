"""Room in host memory and on disk: which sessions' KV goes one tier down, and which is lost."""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

from app.domain.values import SessionId, Tier
from app.gpu.kv.moving import KVTiers
from app.gpu.state.sequence import TokenSequence

DISK_REST_S = 10.0
"""How long no file is written after a write has failed: a full disk does not empty itself in a step."""


class LowerTiers:
    """Sessions without a turn whose KV is off the device, longest away first, and every session that has a file.

    `note_placed` is told of each session that has lost a copy, a file or its KV for the room of another.
    """

    def __init__(
        self,
        tiers: KVTiers,
        disk_blocks: int,
        clock: Callable[[], float],
        note_placed: Callable[[TokenSequence], None],
    ) -> None:
        self.tiers = tiers
        self._note_placed = note_placed
        self.disk_blocks = disk_blocks
        self.away: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        self._files: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        self.promised: Collection[TokenSequence] = ()
        """Those whose files give way to none."""
        self.dropped = 0
        self._clock = clock
        self._writable_at = -math.inf

    @property
    def disk_used(self) -> int:
        """Blocks in files."""
        return self.tiers.files.used

    @property
    def host_is_emptying(self) -> bool:
        """Whether moves under way will free host blocks, or turn them into some that can be freed."""
        return any(
            s.moving in (Tier.TO_DISK, Tier.TO_DEVICE) or (s.moving is Tier.TO_HOST and not s.blocks)
            for s in self.tiers.ledger.moving
        )

    def make_host_room(
        self,
        needed: int,
        on_device: Collection[TokenSequence],
        queued: Collection[TokenSequence],
        keep: Collection[TokenSequence],
    ) -> bool:
        """Whether `needed` host blocks are available now. If not, this frees some, or begins to: ask again later.

        First go the copies of sessions that are `on_device` too. Then sessions move to disk: those of the tenant that
        holds the most host blocks first, and of a tenant the longest away first, and last those whose turn waits for
        room on the device (`queued`). Sessions in `keep` lose nothing. If all that would not be enough, no session
        loses anything.
        """
        host = self.tiers.cache.host
        saving = sum(len(s.host_blocks) for s in self.tiers.ledger.moving if s.moving is Tier.TO_DISK)
        away = (*self.away.values(), *queued)

        def copied() -> Iterator[TokenSequence]:
            return (s for s in on_device if s.host_blocks and s.blocks and s.moving is None and s not in keep)

        def savable() -> Iterator[TokenSequence]:
            held = _largest_tenant_first(away) if self.disk_blocks else ()
            return (s for s in held if s.tier is Tier.HOST and not s.guaranteed and s not in keep)

        if not _reaches(needed - host.available - saving, chain(copied(), savable())):
            return False
        for sequence in copied():
            if host.available >= needed:
                break
            self.tiers.cache.release_copies(sequence, 0)
            self._note_placed(sequence)
        for sequence in savable():
            if host.available + saving >= needed:
                break
            if self.save(sequence, keep) and sequence.moving is Tier.TO_DISK:
                saving += len(sequence.host_blocks)
        return host.available >= needed

    def save_failed(self) -> None:
        """Write no file for `DISK_REST_S` seconds, as a write has failed."""
        self._writable_at = self._clock() + DISK_REST_S

    def save(self, sequence: TokenSequence, keep: Collection[TokenSequence] = ()) -> bool:
        """Move a session from host to disk. False if it does not fit beside the files of `keep` and the `promised`
        ones, or no file is written.

        A file holds whole passes only: the pass of a paused turn is recomputed up to its boundary.
        """
        self.tiers.forget_half_pass(sequence)
        if not sequence.host_blocks:
            self.away.pop(sequence.session, None)
            return True
        clean = sequence.disk_tokens >= sequence.computed
        if not clean and self._clock() < self._writable_at:
            return False
        if not clean and not self.make_disk_room(len(sequence.host_blocks), sequence, keep):
            return False
        self.tiers.files.save(sequence)
        self._note_placed(sequence)
        self._files[sequence.session] = sequence
        self._files.move_to_end(sequence.session)
        return True

    def adopt(self, sequence: TokenSequence, computed: int, file_blocks: int) -> None:
        """Take a file as the session's own, for the first `computed` tokens of its history.

        It is deleted if it does not fit, or if `computed` is 0.
        """
        if not computed:
            self.tiers.files.delete(sequence)
        elif self.make_disk_room(file_blocks, sequence, ()):
            self.tiers.files.adopt(sequence, computed, file_blocks)
            self._files[sequence.session] = sequence
        else:
            self.dropped += 1
            self.tiers.files.delete(sequence)

    def drop(self, sequence: TokenSequence) -> None:
        """Lose the session's KV, as no tier has room for it."""
        self.dropped += 1
        self.free(sequence)
        self._note_placed(sequence)

    def free(self, sequence: TokenSequence) -> None:
        """Free everything that the session holds in any tier."""
        self.tiers.drop(sequence)
        self.away.pop(sequence.session, None)
        self._files.pop(sequence.session, None)

    def give_way(self, blocks: int) -> None:
        """Delete files of `blocks` blocks, or all that may go: the disk has no room for them any more."""
        self._delete_files(self.disk_used - blocks, ())

    def make_disk_room(self, needed: int, for_sequence: TokenSequence, keep: Collection[TokenSequence]) -> bool:
        """Whether a file of `needed` blocks for the sequence fits now, in place of its own."""
        if needed > self.disk_blocks:
            return False
        return self._delete_files(self.disk_blocks - needed + for_sequence.disk_blocks, {for_sequence, *keep})

    def _delete_files(self, most: int, keep: Collection[TokenSequence]) -> bool:
        """Delete files until all have `most` blocks at most: first those whose KV is elsewhere too, then the oldest."""
        files, kept = self.tiers.files, tuple(self._files.values())
        spare = (s for s in kept if s.tier is not Tier.DISK and s.moving is not Tier.TO_DISK)
        only = (s for s in kept if s.tier is Tier.DISK)
        for sequence in chain(spare, only):
            if files.used <= most:
                break
            if sequence in keep or sequence in self.promised or (sequence.guaranteed and sequence.tier is Tier.DISK):
                continue
            if sequence.tier is Tier.DISK:
                self.drop(sequence)
            else:
                files.forget(sequence)
                self._note_placed(sequence)
                del self._files[sequence.session]
        return files.used <= most


def _largest_tenant_first(sequences: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
    """The same, those of the tenant with the most host blocks first; of a tenant in the order in which they are."""
    held = Counter[str]()
    for sequence in sequences:
        held[sequence.tenant] += len(sequence.host_blocks)
    if len(held) <= 1:
        return sequences
    return sorted(sequences, key=lambda each: -held[each.tenant])


def _reaches(blocks: int, holders: Iterable[TokenSequence]) -> bool:
    """Whether host copies of `holders` are together as many as `blocks`."""
    for sequence in holders:
        if blocks <= 0:
            break
        blocks -= len(sequence.host_blocks)
    return blocks <= 0
