"""Sessions whose clients wait: their KV leaves the device, and goes on to disk if they are idle."""

import math
from collections import OrderedDict
from collections.abc import Callable

from app.domain.values import Phase, SessionId, Tier
from app.gpu.kv.placement import Placement
from app.gpu.state.moves import MoveKind
from app.gpu.state.sequence import TokenSequence

RETRY_S = 0.1
"""How often sessions that wait for room try again although nothing has changed. Time alone can give room: a session is
overdue, or a disk may be written again.
"""


class LeavingSessions:
    """Those that are still to be offloaded. Those that find no room on the host cost nothing until there is some."""

    def __init__(self, placement: Placement, note_stays: Callable[[TokenSequence], None]) -> None:
        """`note_stays` is told of each session that would be back before its KV had moved."""
        self._placement = placement
        self._tiers = placement.tiers
        self._host = placement.tiers.cache.host
        self._note_stays = note_stays
        self._waiting: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        self._stuck: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        """Those on the device that have found no room on the host."""
        self._no_room = math.inf
        """So many host blocks could not be had: the fewest that any of the stuck ones needs."""
        self._again_at = math.inf
        """When the stuck ones are looked at again although the host has no room."""
        self._changes = 0
        """Changes of the host's pool when they were last looked at."""

    def __contains__(self, session: SessionId) -> bool:
        return session in self._waiting or session in self._stuck

    def __bool__(self) -> bool:
        return bool(self._waiting or self._stuck)

    def add(self, sequence: TokenSequence) -> None:
        """Let the session leave, from the next look on."""
        self._stuck.pop(sequence.session, None)
        self._waiting[sequence.session] = sequence

    def discard(self, session: SessionId) -> None:
        """Let it stay where it is."""
        self._waiting.pop(session, None)
        self._stuck.pop(session, None)

    def clear(self) -> None:
        """Let all of them stay."""
        self._waiting.clear()
        self._stuck.clear()

    def note_moved(self, sequence: TokenSequence) -> None:
        """Note that the session's KV has changed its place or size."""
        if self._stuck.pop(sequence.session, None) is not None:
            self._waiting[sequence.session] = sequence

    def look(self, now: float) -> None:
        """Send away the sessions that can go now."""
        if self._stuck:
            for sequence in self._unstuck(now):
                self._waiting[sequence.session] = self._stuck.pop(sequence.session)
        for sequence in list(self._waiting.values()):
            self._send_away(sequence, now)
        if not self._stuck:
            self._no_room = self._again_at = math.inf

    def _unstuck(self, now: float) -> list[TokenSequence]:
        """Those for which there may be room by now."""
        first, due = next(iter(self._stuck.values())), now >= self._again_at
        if due:
            self._again_at = now + RETRY_S
        room = self._host.available >= self._no_room
        if room or (due and self._placement.eviction.make_host_room(int(self._no_room), first)):
            self._no_room = math.inf
            return list(self._stuck.values())
        if not due or self._changes == self._host.changes:
            return []
        self._changes = self._host.changes
        return [sequence for sequence in self._stuck.values() if self._shares_more(sequence)]

    def _send_away(self, sequence: TokenSequence, now: float) -> None:
        """Offload a session that waits by one tier: to the host, and from there to disk if it is `idle`."""
        gap_s = sequence.return_time - now
        if sequence.tier is Tier.DEVICE:
            if gap_s < self._seconds(sequence, MoveKind.OUT, MoveKind.IN):
                self.discard(sequence.session)  # it would be back before the move was done
                self._note_stays(sequence)
                return
            self._park(sequence)
            if sequence.tier is Tier.DEVICE:
                self._note_stuck(sequence, now)
                return
        if sequence.tier is Tier.HOST:
            self.discard(sequence.session)
            by_disk_s = self._seconds(sequence, MoveKind.TO_DISK, MoveKind.FROM_DISK, MoveKind.IN)
            if sequence.phase is Phase.IDLE and gap_s >= by_disk_s:
                self._placement.lower.save(sequence)
        elif sequence.tier in (Tier.DISK, None):
            self.discard(sequence.session)

    def _park(self, sequence: TokenSequence) -> None:
        """Begin to move the KV to the host, if that has room or can make some."""
        missing = _missing(sequence)
        if self._host.available < missing >= self._no_room and not self._shares_more(sequence):
            return
        before = sequence.tier, len(sequence.blocks), len(sequence.host_blocks)
        if not self._tiers.park(sequence) and self._makes_host_room(sequence):
            self._tiers.park(sequence)
        if (sequence.tier, len(sequence.blocks), len(sequence.host_blocks)) != before:
            self._placement.refile(sequence)

    def _makes_host_room(self, sequence: TokenSequence) -> bool:
        missing = _missing(sequence)
        return missing < self._no_room and self._placement.eviction.make_host_room(missing, sequence)

    def _note_stuck(self, sequence: TokenSequence, now: float) -> None:
        del self._waiting[sequence.session]
        self._stuck[sequence.session] = sequence
        self._no_room = min(self._no_room, _missing(sequence))
        if self._again_at == math.inf:
            self._again_at, self._changes = now + RETRY_S, self._host.changes

    def _shares_more(self, sequence: TokenSequence) -> bool:
        """Whether the host has the content of the session's next block from another session."""
        copied = len(sequence.host_blocks)
        return copied < len(sequence.hashes) and self._host.find(sequence.hashes[copied]) is not None

    def _seconds(self, sequence: TokenSequence, *kinds: MoveKind) -> float:
        blocks = self._tiers.cache.pool.blocks_for(sequence.computed)
        return sum(self._placement.meter.seconds(kind, blocks) for kind in kinds)


def _missing(sequence: TokenSequence) -> int:
    """Host blocks that a park of the session takes."""
    return len(sequence.blocks) - len(sequence.host_blocks)
