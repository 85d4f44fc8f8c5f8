"""Which turns get device blocks: whose KV comes to the device, and who gives way. Pure planning: no tensors."""

import math
from enum import Enum, auto

from app.domain.values import Tier
from app.gpu.kv.placement import Placement
from app.gpu.planning.queue import ActiveTurn, TurnQueue
from app.gpu.planning.room import RoomShares
from app.gpu.state.sequence import TokenSequence, TurnState


class Admitted(Enum):
    """How far a waiting turn has come."""

    YES = auto()
    """It runs."""
    COMING = auto()
    """Its KV is on the way; those behind it may pass."""
    NO_ROOM = auto()
    """It waits for blocks, and so do those behind it."""


class Admission:
    """Takes turns from the queue to the device, and preempts others for want of blocks."""

    def __init__(self, placement: Placement, queue: TurnQueue) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._cache = placement.tiers.cache
        self._queue = queue
        self._room = RoomShares(queue, placement.tiers.cache.pool.block_size)
        self._promised: tuple[TokenSequence, TurnState] | None = None
        """A turn that others have given way to."""

    def begin_step(self) -> float:
        """Count a step. Returns how many turns a tenant has at least that has none admitted in it: until a turn runs
        that others have given way to, the room is not for those who had it.
        """
        self._room.begin_step()
        if self._promised is None:
            return math.inf
        sequence, turn = self._promised
        if sequence.turn is not turn or sequence.session not in self._queue.waiting:
            self._promised = None
            return math.inf
        return self._queue.turns_of(sequence.tenant)

    @property
    def too_early(self) -> bool:
        """Whether a turn waits only until another has run for some steps more."""
        return self._room.too_early

    def is_promised(self, active: ActiveTurn) -> bool:
        """Whether others have given way to the turn."""
        return self._promised == (active.sequence, active.turn)

    def admit(self, active: ActiveTurn, headroom: int) -> Admitted:
        """Take a waiting turn one step nearer to running, and leave `headroom` blocks to those that run."""
        sequence, blocks_for = active.sequence, self._cache.pool.blocks_for
        if sequence.tier is None and not active.scores_prompt:
            self._cache.match_host_prefix(sequence)
        if sequence.tier is Tier.DISK:
            # A session that waits on the host for room on the device would keep others from leaving the device.
            if not self._can_admit(blocks_for(len(sequence.tokens)), self._placement.loading + headroom, sequence):
                return Admitted.NO_ROOM
            self._placement.load(sequence)
        if sequence.tier is Tier.DISK or _is_coming(sequence):
            return Admitted.COMING
        if sequence.tier is Tier.TO_DISK:
            # It leaves the host for another session's KV. Were it to turn round, neither turn might ever run.
            return Admitted.COMING
        if sequence.tier is Tier.HOST:
            growth = blocks_for(len(sequence.tokens)) - blocks_for(sequence.written)
            if not self._can_admit(len(sequence.host_blocks) + growth, headroom, sequence):
                return Admitted.NO_ROOM
            # Making room may have cost the sequence its own on the host, or blocks that it shared with a victim.
            if sequence.tier is not Tier.HOST or not self._tiers.restore(sequence):
                return Admitted.NO_ROOM
            if _is_coming(sequence):
                return Admitted.COMING
        return self._start(active, headroom)

    def make_room(self, needed: int, sequence: TokenSequence) -> bool:
        """Whether `needed` blocks are available now, after all with a weaker claim than `sequence` have given way."""
        pool = self._cache.pool
        if self._placement.make_room(needed, sequence, or_some=True):
            return True
        while pool.available + self._tiers.freeing < needed:
            victim = self._room.weakest(sequence)
            if victim is None:
                break
            self._queue.preempt(victim)
            if victim is sequence or not self._placement.evict(victim, sequence):
                break
        return pool.available >= needed

    def _start(self, active: ActiveTurn, headroom: int) -> Admitted:
        """Let a turn run whose KV is on the device, or that has none: then it takes the longest prefix that is."""
        sequence = active.sequence
        found = sequence.tier is None and not active.scores_prompt
        if found:
            self._cache.match_prefix(sequence)
        if not self._can_admit(self._cache.missing(sequence, sequence.pending), headroom, sequence):
            if found:
                self._cache.uncompute(sequence, 0)
            return Admitted.NO_ROOM
        if found:
            self._cache.accept_prefix(sequence)
        self._tiers.cancel_move(sequence)
        self._queue.start(active)
        self._room.note_start(active)
        return Admitted.YES

    def _can_admit(self, blocks: int, headroom: int, sequence: TokenSequence) -> bool:
        """Whether a waiting sequence gets its blocks, and leaves `headroom` to others. While others run, sessions
        without a turn give way to it, and turns of tenants that hold more than its own.
        """
        if not self._queue.running:
            return self.make_room(blocks + headroom, sequence)
        return self._placement.make_room(blocks + headroom, sequence) or self._take_share(blocks, headroom, sequence)

    def _take_share(self, blocks: int, headroom: int, sequence: TokenSequence) -> bool:
        """Whether there is room after turns of others have given way. None does where all that would is too little."""
        pool, needed, turn = self._cache.pool, blocks + headroom, sequence.turn
        givers = self._room.givers(sequence)
        if turn is None or not givers:
            return False
        self._placement.make_room(needed, sequence, or_some=True)
        # `headroom` has what those of them that run would still have needed.
        spared = sum(self._room.claim(each) - len(each.blocks) for each in givers)
        if pool.available + self._tiers.freeing + self._cache.freed(givers) + spared < needed:
            return False
        self._promised = sequence, turn
        coming, chosen = pool.available + self._tiers.freeing, list[TokenSequence]()
        for giver in givers:
            if coming >= needed:
                break
            coming += self._cache.freed([giver])
            needed -= self._room.claim(giver) - len(giver.blocks)
            self._queue.preempt(giver)
            chosen.append(giver)
        self._placement.evict_together(chosen, sequence)
        return pool.available >= needed


def _is_coming(sequence: TokenSequence) -> bool:
    """Whether the sequence's KV is on its way to the device, or to the host from disk."""
    return sequence.moving is Tier.TO_DEVICE or (sequence.moving is Tier.TO_HOST and not sequence.blocks)
