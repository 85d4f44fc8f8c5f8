"""Which turns get device blocks: whose KV comes to the device, and which turn gives way. Pure planning: no tensors.

Of several tenants, the one whose turns hold the most blocks gives (max-min fairness; Bertsekas and Gallager, *Data
Networks*, 1992, section 6.5). Guaranteed KV counts for no tenant, and no tenant gives it up.

Weights may lend their memory to KV. A bundle that is lent is streamed, so it costs its bytes on the bus in every step.
KV that is swapped costs its bytes twice. So KV of sessions without a turn gives way first: weights lend only to
sessions with a turn, and take memory back from sessions without one.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from app.domain.values import KVPolicy, SessionId, Tier
from app.gpu.kv.placement import Placement
from app.gpu.planning.queue import StepPlan, TurnQueue
from app.gpu.state.blocks import BlockId
from app.gpu.state.sequence import TokenSequence, TurnState
from app.gpu.weights.arena import Arena

SLICE_STEPS = 2
"""A tenant's last turn that runs has so many steps before it gives way: a step of progress for each way that its KV
moves then."""
PATIENCE_STEPS = 8
"""Steps in a row that did not need a bundle's memory before it is taken back. Loading it costs as much as one step
without it, so under any load this is at most an eighth of a bundle per step.
"""


class Admission:
    """Takes turns from the queue to the device, and preempts others for want of places or blocks."""

    def __init__(self, placement: Placement, queue: TurnQueue, max_running: int) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._cache = placement.tiers.cache
        self._pool = placement.tiers.cache.pool
        self._queue = queue
        self._max_running = max_running
        self._steps = 0
        self._promised: tuple[TokenSequence, TurnState] | None = None
        """A turn that others have given way to."""
        self._most_turns = math.inf
        """Only tenants with fewer that run have turns admitted in this step: one with so many found no room."""
        self.too_early = False
        """Whether in this step a turn would have given its blocks, had it run for longer: it may in a later one."""

    def begin_step(self) -> None:
        """Count a step. Until a turn runs that others have given way to, the room is not for those who had it."""
        self._steps, self.too_early, self._most_turns = self._steps + 1, False, math.inf
        if self._promised is not None:
            sequence, turn = self._promised
            if sequence.turn is turn and sequence.session in self._queue.waiting:
                self._most_turns = self._queue.turns[sequence.tenant]
            else:
                self._promised = None

    def admit(self, sequence: TokenSequence, plan: StepPlan, headroom: int) -> bool:
        """Whether a turn runs from now on that has waited. `headroom` blocks are left to those that run. Once there is
        no room for one turn, none behind it is admitted, but for tenants that have fewer.
        """
        tenant, queue, above = sequence.tenant, self._queue, None
        turns, queued, is_full = queue.turns[tenant], len(queue.waiting), len(queue.running) >= self._max_running
        if turns >= self._most_turns and self._promised != (sequence, sequence.turn):
            return False
        if is_full or (plan.preempted and turns):
            above = queue.above_share(tenant)
            if above is None:
                return False
        starts = self._start(sequence, headroom)
        if starts is False:
            self._most_turns = turns
            plan.preempted |= len(queue.waiting) > queued
        if not starts:
            return False
        self._note_start(sequence, plan)
        if is_full and above is not None:
            queue.preempt(above)  # its KV stays until another session needs the room
        return True

    def make_room(self, needed: int, sequence: TokenSequence) -> bool:
        """Whether `needed` blocks are available now. If not, sequences with a weaker claim than `sequence` give way."""
        if self._placement.make_room(needed, sequence, or_some=True):
            return True
        while self._coming < needed:
            victim = self._weakest(sequence)
            if victim is None:
                break
            self._queue.preempt(victim)
            if victim is sequence or not self._placement.evict(victim, sequence):
                break
        return self._pool.available >= needed

    def _start(self, sequence: TokenSequence, headroom: int) -> bool | None:
        """Take a waiting turn one step nearer to running; returns whether it runs. False: there is no room for it.
        None: its KV is on the way, and turns behind it may pass.
        """
        most_for, scores_prompt = self._pool.most_for, sequence.active_turn.scores_prompt
        self._prefer_longer_prefix(sequence)
        if sequence.tier is None and not scores_prompt:
            self._cache.match_host_prefix(sequence)
        if sequence.tier is Tier.DISK:
            # A session that waits on the host for room on the device would keep others from leaving the device.
            if not self._has_room(most_for(len(sequence.tokens)) + self._placement.loading + headroom, sequence):
                return False
            self._placement.load(sequence)
        # One may leave the host for another session's KV. Were it to turn round, neither turn might ever run.
        if sequence.tier in (Tier.DISK, Tier.TO_DISK) or _is_coming(sequence):
            return None
        if sequence.tier is Tier.HOST:
            if not self._has_room(max(sequence.copy_count, most_for(len(sequence.tokens))) + headroom, sequence):
                return False
            # Making room may have cost the sequence its own on the host, or blocks that it shared with a victim.
            if sequence.tier is not Tier.HOST or not self._tiers.restore(sequence):
                return False
            if _is_coming(sequence):
                return None
        is_new = sequence.tier is None and not scores_prompt
        if is_new:  # it takes the longest prefix that is on the device
            self._cache.match_prefix(sequence)
        if not self._has_room(self._cache.missing(sequence, sequence.pending) + headroom, sequence):
            if is_new:
                self._cache.uncompute(sequence, 0)
            return False
        if is_new:
            self._cache.accept_prefix(sequence)
        self._tiers.cancel_move(sequence)
        self._queue.start(sequence)
        return True

    def _prefer_longer_prefix(self, sequence: TokenSequence) -> None:
        """Drop the session's KV if the caches have a longer prefix of the prompt: another session's, or one that its
        own earlier history left. The turn then starts from that. Dropped blocks stay cached until others need them.
        """
        turn = sequence.active_turn
        has_begun = turn.cached_tokens is not None or sequence.checkpoint is not None
        if has_begun or turn.scores_prompt or sequence.guaranteed or sequence.tier is None:
            return
        if self._cache.finds_longer_prefix(sequence):
            self._tiers.cut(sequence, 0)

    def _note_start(self, sequence: TokenSequence, plan: StepPlan) -> None:
        """Note when a turn has left the queue, and how much of its history it recomputes."""
        turn = sequence.active_turn
        turn.slice_began, turn.slice_reached = self._steps, sequence.reached
        if turn.scores_prompt:
            del turn.prompt_logprobs[sequence.computed :]  # it may have lost its KV halfway
        turn.tokens_recomputed += max(0, min(sequence.reached, len(sequence.tokens) - 1) - sequence.computed)
        if turn.cached_tokens is None:
            turn.cached_tokens = sequence.computed
        if not turn.announced:
            turn.announced = True
            plan.started.append(turn)

    def _has_room(self, needed: int, sequence: TokenSequence) -> bool:
        """Whether a waiting sequence gets its blocks. While others run, sessions without a turn give way to it, and
        turns of tenants that hold more than its own: none does where all that would is too little.
        """
        if not self._queue.running:
            return self.make_room(needed, sequence)
        if self._placement.make_room(needed, sequence):
            return True
        givers, turn = self._givers(sequence), sequence.turn
        if turn is None or not givers:
            return False
        self._placement.make_room(needed, sequence, or_some=True)
        # What has to be left to those that run has what givers among them would still have needed.
        spared = sum(self._claim(each) - each.held_count for each in givers)
        if self._coming + self._cache.freed(givers) + spared < needed:
            return False
        self._promised = sequence, turn
        coming, chosen = self._coming, list[TokenSequence]()
        for giver in givers:
            if coming >= needed:
                break
            coming += self._cache.freed([giver])
            needed -= self._claim(giver) - giver.held_count
            self._queue.preempt(giver)
            chosen.append(giver)
        self._placement.evict_together(chosen, sequence)
        return self._pool.available >= needed

    def _givers(self, asking: TokenSequence) -> list[TokenSequence]:
        """The sequences that give up their claims for the one that is `asking`, in this order; they may be too few.

        Their tenants claim more than the tenant that asks would then. So no turn takes its room back by the same right.
        A tenant gives its last turn that runs only to a tenant without any, after some steps of progress. So every turn
        ends.
        """
        if not self._queue.is_shared:
            return []
        places, found = self._places(), list[TokenSequence]()
        held, turns = self._held(places), self._queue.turns[asking.tenant]
        others = [each for each in places.pop(asking.tenant, ()) if each is not asking]
        wanted = self._needs(asking) + sum(map(self._claim, others))
        while richer := [tenant for tenant in places if held[tenant] > wanted]:
            largest = max(richer, key=held.__getitem__)
            giver = places[largest].pop()
            if not places[largest] and self._queue.runs(giver) and (turns or not self._had_slice(giver)):
                self.too_early |= not turns
                del places[largest]
                continue
            found.append(giver)
            held[largest] -= self._claim(giver)
        return found

    def _weakest(self, asking: TokenSequence) -> TokenSequence | None:
        """The sequence with the weakest claim to its blocks: the last in the queue, then the youngest that runs, which
        may be the one that asks. Its tenant is the one that holds the most, unless that has only one turn that runs.
        None: no sequence is left but the one that asks.
        """
        running = list(self._queue.running.values())
        waiting = [each for each in self._waiting() if each is not asking]
        least = 1 if waiting else 2  # so the oldest that runs is never the last of its tenant
        claims = waiting or [each for each in running if each is asking or not each.guaranteed]
        if claims in ([], [asking]):
            return None
        if self._queue.is_shared:
            held = self._held(self._places())
            largest = max(held, key=held.__getitem__, default=asking.tenant)
            of_largest = [each for each in claims if each.tenant == largest]
            if len(of_largest) >= least and (largest == asking.tenant or held[largest] > held[asking.tenant]):
                claims = of_largest
        return claims[-1]

    @property
    def _coming(self) -> int:
        """Blocks that are available, or will be once moves have ended."""
        return self._pool.available + self._pool.leaving

    def _needs(self, sequence: TokenSequence) -> int:
        return self._pool.most_for(len(sequence.tokens) + 1)

    def _claim(self, sequence: TokenSequence) -> int:
        """Blocks that a sequence with a turn has; if it runs, also those that its other tokens and one more need."""
        return max(sequence.held_count, self._needs(sequence) if self._queue.runs(sequence) else 0)

    def _held(self, places: Mapping[str, Iterable[TokenSequence]]) -> Counter[str]:
        return Counter({tenant: sum(map(self._claim, place)) for tenant, place in places.items()})

    def _places(self) -> dict[str, list[TokenSequence]]:
        """By tenant, those on the device that can give way: the oldest that runs first, the last that waits last."""
        places: dict[str, list[TokenSequence]] = {}
        for sequence in (*self._queue.running.values(), *self._waiting()):
            if not sequence.guaranteed:
                places.setdefault(sequence.tenant, []).append(sequence)
        return places

    def _waiting(self) -> list[TokenSequence]:
        """Those that wait with their KV on the device, and may give way."""
        waiting = self._queue.waiting.values()
        return [each for each in waiting if each.tier is Tier.DEVICE and not each.guaranteed]

    def _had_slice(self, sequence: TokenSequence) -> bool:
        """Whether a turn that runs has come further than ever, and has run for some steps."""
        turn = sequence.turn
        if turn is None:
            return False
        return sequence.reached > turn.slice_reached and self._steps >= turn.slice_began + SLICE_STEPS


def _is_coming(sequence: TokenSequence) -> bool:
    """Whether the sequence's KV is on its way to the device, or to the host from disk."""
    return sequence.moving is Tier.TO_DEVICE or (sequence.moving is Tier.TO_HOST and not sequence.blocks)


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
        pool = placement.tiers.cache.pool
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
        moved = pool.shrink(surplus)
        for sequence in (*placement.active.values(), *placement.resident.values()):
            sequence.blocks = [moved.get(block, block) for block in sequence.blocks]
        self._copy_blocks(list(moved.items()))
        self.lent -= 1
        self._take_back(self._arena.lendable[self.lent])
        return True
