"""Weights that lend their memory to KV: which bundles, when, and when they come back.

A bundle that is lent is streamed, so it costs its bytes on the bus in every step. KV that is swapped costs its bytes
twice. So KV of sessions without a turn gives way first: weights lend only to sessions with a turn, and take memory back
from sessions without one.
"""

from collections.abc import Callable, Sequence

from app.domain.values import KVPolicy, SessionId
from app.gpu.kv.placement import Placement
from app.gpu.state.blocks import BlockId
from app.gpu.state.sequence import TokenSequence
from app.gpu.weights.arena import Arena

PATIENCE_STEPS = 8
"""Steps in a row that did not need a bundle's memory before it is taken back. Loading it costs as much as one step
without it, so under any load this is at most an eighth of a bundle per step.
"""


class Borrower:
    """Borrows memory of weights for KV: always the first bundles of the arena, so that KV has one run of memory. It is
    given back on the engine's thread, while no step runs.
    """

    def __init__(
        self,
        arena: Arena,
        lend: Callable[[int], None],
        take_back: Callable[[int], None],
        copy_blocks: Callable[[Sequence[tuple[BlockId, BlockId]]], None],
    ) -> None:
        """`lend` and `take_back` have the weights do that with a bundle of the arena; `copy_blocks` launches copies of
        device blocks, (source, target) each.
        """
        self._arena = arena
        self._lend, self._take_back, self._copy_blocks = lend, take_back, copy_blocks
        self.lent = 0
        """Bundles."""
        self._steps_without = 0
        """Steps in a row that did not need the bundle lent last."""
        self._weights = TokenSequence(SessionId("weights"), b"", resume_at=0.0)
        """Sessions without a turn are evicted for this one. It is due now, so sessions that are due too stay."""

    @property
    def blocks(self) -> int:
        """Blocks that KV has now."""
        return self._arena.blocks(self.lent)

    def borrow(self, missing: int) -> int:
        """Have weights lend at least `missing` blocks; returns how many they lend. 0 if there are not so many."""
        before = self.blocks
        for lent in range(self.lent + 1, len(self._arena.lendable) + 1):
            if self._arena.blocks(lent) - before >= missing:
                bundles = self._arena.lendable[self.lent : lent]
                self.lent, self._steps_without = lent, 0
                for bundle in bundles:
                    self._lend(bundle)
                break
        return self.blocks - before

    def settle(self, placement: Placement, headroom: Callable[[], int], *, idle: bool) -> bool:
        """Give one bundle back if KV does not need its memory; returns whether it has been. `headroom` is how many
        device blocks the sessions that run will still need.

        Called before each step; and while there is none, `idle`, for as long as it returns True: an engine without work
        has nothing else to copy.
        """
        if not self.lent:
            return False
        cache, pool = placement.tiers.cache, placement.tiers.cache.pool
        if placement.policy is KVPolicy.NONE:
            needed = pool.owned
        else:  # what the sessions with a turn have
            needed = len(set().union(*(sequence.blocks for sequence in placement.active.values())))
        left = self._arena.blocks(self.lent - 1)
        fits = needed + headroom() <= left
        self._steps_without = self._steps_without + 1 if fits else 0
        if self._steps_without < PATIENCE_STEPS and not (idle and fits):
            return False
        surplus = self.blocks - left
        # While no step runs, a bundle that is lent costs nothing: no session has to give way to it.
        if pool.available < surplus and (idle or not placement.make_room(surplus, self._weights, prefetch=True)):
            return False
        end = pool.num_blocks - surplus
        if any(block >= end for blocks in placement.tiers.held(pool) for block in blocks):
            return False  # it is being copied
        copies = cache.shrink(surplus, [*placement.active.values(), *placement.resident.values()])
        assert copies is not None, "as many are available"
        self._copy_blocks(copies)
        self.lent -= 1
        self._take_back(self._arena.lendable[self.lent])
        return True
