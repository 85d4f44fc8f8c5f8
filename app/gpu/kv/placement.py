"""Placement of KV: where each session's is, and what has been decided about it.

The policy decides. `signal` offloads KV when its session says that it waits (`Phases`), and when others need the room
(`Eviction`). `lru` offloads only then, longest idle first. `none` drops KV instead. Planning only: time comes from a
clock argument.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from app.domain.memory_map import TierCounts
from app.domain.values import KVPolicy, Phase, SessionId, Tier
from app.gpu.kv.eviction import Eviction
from app.gpu.kv.ledger import MoveMeter
from app.gpu.kv.lower import LowerTiers
from app.gpu.kv.moving import KVTiers
from app.gpu.kv.prefetch import PrefetchMargin
from app.gpu.kv.victim_order import VictimOrder
from app.gpu.state.moves import Move, Moved, MoveKind
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState

WRITE_BEHIND_BLOCKS = 8
"""Blocks in one early copy: so few that a park hardly waits for it."""


class Placement:
    """Places the KV of sessions without a turn.

    A session without a turn is `resident` while it holds device blocks, and in `lower.away` while its KV is elsewhere.
    """

    def __init__(
        self,
        tiers: KVTiers,
        policy: KVPolicy,
        disk_blocks: int,
        clock: Callable[[], float],
        borrow: Callable[[int], int],
    ) -> None:
        """`borrow` gets at least so many device blocks from weights and returns how many; 0: weights have too few."""
        self.tiers = tiers
        self.policy = policy
        self.lower = LowerTiers(tiers, disk_blocks, clock, self.note_placed)
        self.meter = MoveMeter(tiers.block_bytes)
        self.resident: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        """Longest idle first."""
        self.active: dict[SessionId, TokenSequence] = {}
        """Sessions that have a turn."""
        self.margin = PrefetchMargin()
        self.changed = False
        """Whether there may be room where there was none, or a prefetch may take longer, since `Phases` last looked."""
        self.clock = clock
        self._placed: dict[SessionId, TokenSequence] = {}
        self._moved: dict[SessionId, TokenSequence] = {}
        self._victims = VictimOrder(self.resident, self.active, tiers.ledger, policy, clock, self.margin)
        self.eviction = Eviction(
            tiers,
            self.lower,
            policy,
            self._victims,
            resident=self.resident,
            active=self.active,
            borrow=borrow,
            refile=self.refile,
        )
        self._ordered_at: dict[int, float] = {}
        self._early_bytes = self._disk_failures = self._late = 0

    def begin_turn(self, sequence: TokenSequence, turn: TurnState) -> None:
        """Note that the session has a turn: its KV is wanted on the device."""
        self._take_out(sequence)
        sequence.phase, sequence.resume_at, sequence.plain_to = Phase.COMPUTE, None, 0
        self.tiers.head_back(sequence)
        turn.begun_at = self.clock()
        self.note_placed(sequence)
        self.active[sequence.session] = sequence
        self._late += sequence.tier not in (Tier.DEVICE, None)

    def end_turn(self, sequence: TokenSequence) -> None:
        """Note that the session has no turn, or has just been opened."""
        self._take_out(sequence)
        self.note_placed(sequence)
        if sequence.blocks:
            self._take_in(sequence)
        elif sequence.tier is not None:
            self.lower.away[sequence.session] = sequence

    def cut(self, sequence: TokenSequence, length: int) -> None:
        """Forget the KV of a session without a turn from position `length` on, in every tier."""
        self.tiers.cut(sequence, length)
        self.refile(sequence)

    def close(self, sequence: TokenSequence) -> None:
        """Free everything that the session holds in any tier."""
        self._take_out(sequence)
        self.lower.free(sequence)

    def note_placed(self, sequence: TokenSequence) -> None:
        """Note that the session's KV has changed its place or size."""
        self._placed[sequence.session] = self._moved[sequence.session] = sequence

    def take_moved(self) -> list[TokenSequence]:
        """The same for `Phases`: sessions whose KV has changed its place or size since it last looked."""
        moved, self._moved = self._moved, {}
        return list(moved.values())

    def forget_order(self) -> None:
        """Sessions without a turn may give way in another order now: time has passed, or one has said something."""
        self._victims.forget()

    def take_placed(self) -> list[TokenSequence]:
        """Sessions whose KV has changed its place or size since the last call."""
        placed, self._placed = self._placed, {}
        return list(placed.values())

    def take_orders(self) -> list[Move]:
        """The moves that have been decided on since the last call."""
        orders, self.tiers.ledger.orders = self.tiers.ledger.orders, []
        now = self.clock()
        for move in orders:
            self._ordered_at[move.number] = now
            self.note_placed(self.tiers.ledger.find(move.number)[1])
        return orders

    def complete(self, report: Moved) -> Move:
        """Account for a move that has ended; `Phases.tick` then goes on with what it made possible."""
        move, sequence = self.tiers.complete(report)
        self.meter.add(move, report)
        ordered_at = self._ordered_at.pop(move.number)
        if move.early:
            self._early_bytes += len(move.source) * self.tiers.block_bytes
        if report.error is not None and move.kind in (MoveKind.TO_DISK, MoveKind.FROM_DISK):
            self.count_disk_failures(1)
            if move.kind is MoveKind.TO_DISK:
                self.lower.save_failed()
        if sequence.turn is not None and not sequence.turn.paused and move.kind in (MoveKind.IN, MoveKind.FROM_DISK):
            sequence.turn.restore_ms += (self.clock() - max(ordered_at, sequence.turn.begun_at)) * 1000
        self.refile(sequence)
        self.changed = True
        return move

    @property
    def loading(self) -> int:
        """Blocks that come from disk and will need room on the device."""
        return sum(s.disk_blocks for s in self.tiers.ledger.moving if s.moving is Tier.TO_HOST and not s.blocks)

    def load(self, sequence: TokenSequence) -> None:
        """Begin to read the file of a session that has a turn. Its KV is lost if the host will have no room."""
        if self.tiers.files.load(sequence):
            return
        loading = self.eviction.make_host_room(sequence.disk_blocks, sequence) and self.tiers.files.load(sequence)
        if not loading and not self.lower.host_is_emptying:
            self.lower.drop(sequence)

    def free_host(self, sequence: TokenSequence) -> None:
        """Take the KV of a session without a turn out of host memory, unless it moves: to disk, or it is lost."""
        if sequence.busy or sequence.moving is not None or not sequence.host_blocks:
            return
        if sequence.blocks:
            self.tiers.cache.release_copies(sequence, 0)
        elif not self.lower.save(sequence):
            self.lower.drop(sequence)
        self.refile(sequence)

    def write_behind(self, running: Iterable[TokenSequence]) -> None:
        """While the link is idle, copy full blocks of one running session to the host: its next park is shorter."""
        if self.policy is not KVPolicy.SIGNAL or self.tiers.ledger.in_flight:
            return
        host = self.tiers.cache.host
        for sequence in (each for each in running if each.waits):
            end = min(len(sequence.hashes), len(sequence.host_blocks) + WRITE_BEHIND_BLOCKS)
            if len(sequence.host_blocks) < end and host.available >= 2 * WRITE_BEHIND_BLOCKS:
                self.tiers.copy_out(sequence, end, early=True)
                return

    def note_step(self, seconds: float) -> None:
        """The engine has been busy with a step for so long: prefetches begin that much earlier."""
        before_s = self.margin.seconds
        self.margin.note_step(seconds)
        self.changed |= self.margin.seconds > before_s

    def count_disk_failures(self, files: int) -> None:
        """Count files that could not be written or read."""
        self._disk_failures += files

    def counts(self) -> TierCounts:
        """Counts since the start."""
        return TierCounts(
            write_behind_bytes=self._early_bytes,
            turned_round=self.tiers.turned_round,
            dropped=self.lower.dropped,
            disk_failures=self._disk_failures,
            late_restores=self._late,
        )

    def _take_out(self, sequence: TokenSequence) -> None:
        """Take the session out of every list; others may have the room that it gives up."""
        self.changed = True
        self._victims.forget()
        self.active.pop(sequence.session, None)
        self.resident.pop(sequence.session, None)
        self.lower.away.pop(sequence.session, None)

    def refile(self, sequence: TokenSequence) -> None:
        """Move a session without a turn to the list that fits the place of its KV."""
        self.note_placed(sequence)
        session = sequence.session
        if session in self.resident and not sequence.blocks:
            del self.resident[session]
            if sequence.tier is not None:
                self.lower.away[session] = sequence
        elif session in self.lower.away and sequence.tier in (Tier.DEVICE, None):
            del self.lower.away[session]
            if sequence.blocks:
                self._take_in(sequence)

    def _take_in(self, sequence: TokenSequence) -> None:
        self.resident[sequence.session] = sequence
        self._victims.forget()
