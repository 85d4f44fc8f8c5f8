"""The end of the server: KV on the device and on the host is written to disk, as far as there is room and time."""

from collections import Counter, deque
from collections.abc import Sequence

from app.domain.values import Tier
from app.gpu.kv.placement import Placement
from app.gpu.state.moves import MoveKind
from app.gpu.state.sequence import TokenSequence

UNDER_WAY_BYTES = 256 << 20
"""So much KV is on its way to disk at once, or one session's: little enough to be soon over when the time is."""
PARKS = 2
"""So often a session begins to leave the device: the first time, the host may get full behind a copy under way."""


class ShutdownFlush:
    """Takes sessions to disk, the first ones first, until `until` on the placement's clock.

    Room on disk is promised in their order, so none loses its file for a later session. A session with a turn
    waits for the turn's end. KV goes over the host, which may be smaller than the device: as files are written, the
    host gets room for the next ones.
    """

    def __init__(self, placement: Placement, sequences: Sequence[TokenSequence], until: float) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._until = until
        self._sequences = sequences
        self._promised: dict[TokenSequence, None] = {}
        """Those that have room on disk, also once they are closed."""
        self._unpromised: list[TokenSequence] = []
        room, pool, host = placement.disk_blocks, placement.tiers.cache.pool, placement.tiers.cache.host
        for sequence in sequences:  # those whose files fit together
            tokens = sequence.computed if sequence.turn is None else len(sequence.tokens)
            blocks = max(pool.kept_for(tokens), sequence.disk_blocks)
            if blocks <= room and (blocks <= host.num_blocks or _is_kept(sequence)):  # it goes over the host
                room -= blocks
                self._promised[sequence] = None
            else:
                self._unpromised.append(sequence)
        placement.promised = self._promised
        self._waiting = deque(each for each in self._promised if each.turn is None and not _is_kept(each))
        self._in_turns = [each for each in self._promised if each.turn is not None]
        self._begun: list[TokenSequence] = []
        self._aside: list[TokenSequence] = []
        """Those for which the host has no room, unless a turn ends that holds some of it."""
        self._parks = Counter[TokenSequence]()

    @property
    def kept(self) -> list[TokenSequence]:
        """Sessions all of whose KV is on disk."""
        return [sequence for sequence in self._sequences if sequence.computed and _is_kept(sequence)]

    @property
    def lost(self) -> list[TokenSequence]:
        """Sessions that have KV which is not on disk."""
        return [sequence for sequence in self._sequences if not _is_kept(sequence)]

    def go_on(self) -> bool:
        """Go on with what has become possible: a move has ended, or a turn. Returns whether nothing more follows."""
        ended = [sequence for sequence in self._in_turns if sequence.turn is None]
        if ended:
            self._in_turns = [sequence for sequence in self._in_turns if sequence.turn is not None]
            self._waiting.extendleft(reversed([*ended, *self._aside]))
            self._aside.clear()
        self._begun = [sequence for sequence in self._begun if self._goes_on(sequence)]
        while (following := self._next()) is not None:
            if self._has_time(following) and self._goes_on(following):
                self._begun.append(following)
        return not (self._begun or self._waiting or self._in_turns)

    def _next(self) -> TokenSequence | None:
        """The next to begin, if not too much is under way. While one waits for room on the host, that is one which will
        give it some. If there is none and nothing moves, the waiting session is set aside.
        """
        under_way = sum(self._blocks(each) for each in self._begun if each.moving) * self._tiers.block_bytes
        if not self._waiting or under_way >= UNDER_WAY_BYTES:
            following = None
        elif all(sequence.moving for sequence in self._begun):
            following = self._waiting[0]
        else:
            following = next((each for each in self._waiting if each.tier is Tier.HOST), None)
        if following is not None:
            self._waiting.remove(following)
        elif self._begun and not self._tiers.in_flight:
            self._aside += self._begun
            self._begun.clear()
            return self._next()
        return following

    def _has_time(self, sequence: TokenSequence) -> bool:
        seconds, left = self._placement.meter.seconds, self._until - self._placement.clock()
        written = seconds(sum(self._blocks(each) for each in (*self._begun, sequence)), MoveKind.TO_DISK)
        if sequence.sent:
            return written + seconds(sequence.disk_blocks, MoveKind.FROM_DISK) <= left
        return written + seconds(sequence.uncopied, MoveKind.OUT) <= left

    def _goes_on(self, sequence: TokenSequence) -> bool:
        """Take it one tier down, if it does not move already; a file that a client has sent first comes back up. False:
        it has arrived, or gets no further.
        """
        if sequence.turn is not None or _is_kept(sequence):
            return False
        if sequence.moving is None and self._placement.clock() >= self._until:
            return False
        if sequence.moving is Tier.TO_DEVICE:
            self._tiers.cancel_move(sequence)
        if sequence.tier is Tier.DISK and not self._tiers.load(sequence):
            self._make_host_room(sequence, sequence.disk_blocks)
            self._tiers.load(sequence)
        if sequence.tier is Tier.DEVICE and not self._park(sequence):
            return False
        if sequence.tier is Tier.HOST and not self._placement.save(sequence):
            return False
        self._placement.refile(sequence)
        return not _is_kept(sequence)

    def _park(self, sequence: TokenSequence) -> bool:
        """Move it to the host, or have it wait for room there. False: its copies fail."""
        if self._parks[sequence] == PARKS:
            return False
        if not self._tiers.park(sequence):
            self._make_host_room(sequence, sequence.uncopied)
            self._tiers.park(sequence)
        self._parks[sequence] += sequence.moving is Tier.TO_HOST
        return True

    def _make_host_room(self, sequence: TokenSequence, missing: int) -> None:
        """Free host blocks for the session: copies of what the device or a file has too, then KV that no file will
        keep.
        """
        host = self._tiers.cache.host
        for other in (*self._placement.resident.values(), *self._placement.active.values()):
            if host.available < missing and other.blocks and other.moving is None and other is not sequence:
                self._tiers.cache.release_copies(other, 0)
                self._placement.note_placed(other)
        for other in self._sequences:
            if host.available < missing and other.tier is Tier.HOST and other.moving is None and _is_kept(other):
                self._placement.save(other)
        while self._unpromised and host.available < missing:
            other = self._unpromised.pop()
            if other.tier is Tier.HOST and other.turn is None:
                self._placement.drop(other)

    def _blocks(self, sequence: TokenSequence) -> int:
        return self._tiers.cache.pool.kept_for(sequence.computed)


def _is_kept(sequence: TokenSequence) -> bool:
    return not sequence.computed or (sequence.disk_tokens >= sequence.computed and not sequence.sent)
