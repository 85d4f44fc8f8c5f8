"""Which rows run in the next step. Pure planning: no tensors.

Sequences with a turn are `waiting` (first come, first served) or `running`; `Placement` has those without one. A step
takes the next token of every sequence that decodes, then as much of the prompts as the token budget allows, then admits
from the queue; a sequence whose KV is on its way back to the device is passed by those behind it. When blocks run
short, the KV of a session without a turn goes first, then that of the last in the queue, then the youngest running
sequence goes back to the front of the queue: swapped out, or where there is no lower tier computed again later. The
oldest running sequence is never put back and can have the whole pool, so every turn ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from app.domain.values import SessionId, Tier
from app.gpu.kv.blocks import BlockId
from app.gpu.kv_tiers.placement import Placement
from app.gpu.passes.segments import Row
from app.gpu.passes.ways import PassPlan, plan_pass, row_limit
from app.gpu.state.sequence import Sequence
from app.gpu.state.turn import TurnState


@dataclass(frozen=True, slots=True, eq=False)
class ActiveTurn:
    """A turn that waits or runs, and its sequence."""

    sequence: Sequence
    turn: TurnState

    @property
    def scores_prompt(self) -> bool:
        """Whether the turn still needs logits of prompt tokens, which only computing them gives."""
        turn = self.turn
        return turn.sampling.prompt_logprobs is not None and len(turn.prompt_logprobs) < turn.prompt_tokens - 1

    def samples_at(self, end: int) -> bool:
        """Whether a row that ends before position `end` yields the next token."""
        return end == len(self.sequence.tokens) and self.turn.stop.max_tokens > 0


@dataclass(slots=True)
class StepPlan:
    """One step: its rows, those of one token first, and the block copies (source, target) to make before it."""

    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    started: list[TurnState] = field(default_factory=list)
    """Turns that have left the queue, for the first time or since they were resumed."""
    gave_way: bool = False
    """Whether a sequence was put back: then nobody was admitted, and the next plan may find room for somebody."""


class Scheduler:
    """Owns the queue and the running set, and decides whose work gives way."""

    def __init__(self, placement: Placement, *, num_layers: int, max_step_tokens: int, max_running: int) -> None:
        self.placement = placement
        placement.headroom = self._growth
        self.cache = placement.tiers.cache
        self.num_layers = num_layers
        self.max_step_tokens = max_step_tokens
        self.max_running = max_running
        self._whole_pass = PassPlan(0, num_layers)
        self.waiting: OrderedDict[SessionId, ActiveTurn] = OrderedDict()
        self.running: OrderedDict[SessionId, ActiveTurn] = OrderedDict()
        """Oldest first."""

    @property
    def has_work(self) -> bool:
        """Whether any turn waits or runs."""
        return bool(self.waiting or self.running)

    def enqueue(self, sequence: Sequence, turn: TurnState) -> None:
        """Put a turn that has just begun at the end of the queue, with at least one token left to compute: the last of
        the context, which meets the breakpoints that are armed now.
        """
        last = len(sequence.tokens) - 1
        self.placement.tiers.cut(sequence, last)
        sequence.reached = min(sequence.reached, last)
        sequence.interventions.truncate(sequence.reached)
        self.placement.begin_turn(sequence, turn)
        self.waiting[sequence.session] = ActiveTurn(sequence, turn)

    def requeue(self, sequence: Sequence, turn: TurnState) -> None:
        """Put a turn that is resumed at the front of the queue: it has had its place in it."""
        self.placement.begin_turn(sequence, turn)
        self.waiting[sequence.session] = ActiveTurn(sequence, turn)
        self.waiting.move_to_end(sequence.session, last=False)

    def retire(self, sequence: Sequence) -> None:
        """Take a sequence whose turn has ended or paused out of the queue; it keeps its KV."""
        self.forget(sequence)
        self.placement.end_turn(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue and the running set."""
        self.waiting.pop(sequence.session, None)
        self.running.pop(sequence.session, None)

    def plan(self) -> StepPlan:
        """Choose the rows of the next step and give them the blocks that they write to.

        No rows although there is work: everything waits for moves that are under way.
        """
        plan = StepPlan()
        budget, queued = self.max_step_tokens, len(self.waiting)
        for active in sorted(self.running.values(), key=lambda running: running.sequence.pending > 1):
            if budget > 0 and active.sequence.session in self.running:  # an earlier one may have put this one back
                budget -= self._add_row(plan, active, budget)
        plan.gave_way = len(self.waiting) > queued
        for active in [] if plan.gave_way else list(self.waiting.values()):
            if budget <= 0 or len(self.running) >= self.max_running or self._blocks(plan, active):
                break
            if active.sequence.session in self.running:
                budget -= self._add_row(plan, active, budget)
        live = [row for row in plan.rows if row.sequence.session in self.running]
        plan.rows[:] = sorted(live, key=lambda row: row.length > 1)
        return plan

    def give_up(self, rows: Iterable[Row]) -> None:
        """Take back what was reserved for rows that will not run after all. The rows before them still do."""
        for row in rows:
            self.cache.release_blocks(row.sequence, self.cache.pool.blocks_for(row.first))

    def _add_row(self, plan: StepPlan, active: ActiveTurn, budget: int) -> int:
        """Plan the turn's next tokens; returns how many. 0 if it gave way for want of blocks, or waits for some.

        A row with breakpoints is cut by nobody else's load, so it can exceed the budget once in a step.
        """
        sequence, turn = active.sequence, active.turn
        watched = sequence.watched
        length = row_limit(sequence, self.max_step_tokens) if watched else min(sequence.pending, budget)
        if not self._has_room(sequence, self.cache.missing(sequence, length)):
            return 0
        if sequence.paused_pass is not None:
            self.placement.tiers.end_pass(sequence)
        plan.copies.extend(self.cache.reserve(sequence, length))
        first = sequence.computed
        way = plan_pass(sequence, turn, length, self.num_layers) if watched else self._whole_pass
        samples = not way.pauses and active.samples_at(first + length)
        scores = not way.pauses and active.scores_prompt
        plan.rows.append(Row(sequence, turn, first, length, way, samples, scores))
        return length

    def _blocks(self, plan: StepPlan, active: ActiveTurn) -> bool:
        """Take a waiting turn one step nearer to running. True if it blocks the queue: it has to wait for room."""
        sequence = active.sequence
        tiers = self.placement.tiers
        headroom = self._growth()
        if sequence.tier is Tier.DISK:
            # What waits on the host for room on the device would keep others from leaving the device.
            needed = self.cache.pool.blocks_for(len(sequence.tokens)) + self.placement.loading + headroom
            if not self._admits(sequence, needed):
                return True
            self.placement.load(sequence)
        if sequence.tier is Tier.DISK or _is_coming(sequence):
            return False
        growth = self.cache.pool.blocks_for(len(sequence.tokens)) - self.cache.pool.blocks_for(sequence.written)
        if sequence.tier in (Tier.HOST, Tier.TO_DISK):
            if not self._admits(sequence, len(sequence.host_blocks) + growth + headroom):
                return True
            tiers.head_back(sequence)
            # Making room may have cost the sequence its own on the host, or blocks that it shared with who gave way.
            if sequence.tier is not Tier.HOST or not tiers.restore(sequence):
                return True
            if _is_coming(sequence):
                return False
        found = sequence.tier is None and not active.scores_prompt
        if found:
            self.cache.match_prefix(sequence)
        if not self._admits(sequence, self.cache.missing(sequence, sequence.pending) + headroom):
            if found:
                self.cache.uncompute(sequence, 0)
            return True
        if found:
            self.cache.accept_prefix(sequence)
        tiers.turn_round(sequence)
        del self.waiting[sequence.session]
        self.running[sequence.session] = active
        self._note_start(plan, active)
        return False

    def _admits(self, sequence: Sequence, needed: int) -> bool:
        """Whether a waiting sequence gets its blocks. While others run, only sessions without a turn give way to it."""
        if self.running:
            return self.placement.make_room(needed, sequence)
        return self._has_room(sequence, needed)

    def _growth(self) -> int:
        """Blocks that the sequences that run need for the rest of their tokens and one more."""
        blocks_for = self.cache.pool.blocks_for
        sequences = (active.sequence for active in self.running.values())
        return sum(max(0, blocks_for(len(each.tokens) + 1) - len(each.blocks)) for each in sequences)

    def _note_start(self, plan: StepPlan, active: ActiveTurn) -> None:
        sequence, turn = active.sequence, active.turn
        if active.scores_prompt:
            del turn.prompt_logprobs[sequence.computed :]  # it may have lost its KV halfway
        turn.tokens_recomputed += max(0, min(sequence.reached, len(sequence.tokens) - 1) - sequence.computed)
        if turn.cached_tokens is None:
            turn.cached_tokens = sequence.computed
        if not turn.announced:
            turn.announced = True
            plan.started.append(turn)

    def _has_room(self, sequence: Sequence, needed: int) -> bool:
        """Whether `needed` blocks are available now, after all with a weaker claim than `sequence` have given way."""
        pool, tiers = self.cache.pool, self.placement.tiers
        if self.placement.make_room(needed, sequence, or_some=True):
            return True
        while pool.available + tiers.freeing < needed:
            victim = self._weakest(sequence)
            if victim is None:
                break
            self._put_back(victim)
            if victim is sequence or not self.placement.evict(victim, sequence):
                break
        return pool.available >= needed

    def _weakest(self, asking: Sequence) -> Sequence | None:
        """The sequence with the weakest claim to its blocks: the last in the queue, then the youngest that runs.

        It may be the one that asks, unless nobody else is left.
        """
        waiting = (active.sequence for active in self.waiting.values())
        holders = [w for w in waiting if w.tier is Tier.DEVICE and w is not asking and not w.guaranteed]
        if holders:
            return holders[-1]
        sequences = (active.sequence for active in self.running.values())
        running = [r for r in sequences if r is asking or not r.guaranteed]
        return None if running in ([], [asking]) else running[-1]

    def _put_back(self, sequence: Sequence) -> None:
        """A sequence that runs goes to the front of the queue."""
        active = self.running.pop(sequence.session, None)
        if active is not None:
            self.waiting[sequence.session] = active
            self.waiting.move_to_end(sequence.session, last=False)

    def check_integrity(self) -> None:
        """Raise RuntimeError if a sequence is in two lists, or one at rest is busy, or a busy one has nothing to do."""
        resident, away = self.placement.resident, self.placement.lower.away
        groups = [set(group) for group in (self.waiting, self.running, resident, away)]
        if len(set().union(*groups)) != sum(map(len, groups)):
            raise RuntimeError("a session is in two lists")
        if any(sequence.busy for sequence in (*resident.values(), *away.values())):
            raise RuntimeError("a session that is placed has a turn that is not paused")
        active = [each.sequence for each in (*self.waiting.values(), *self.running.values())]
        if any(not sequence.busy or not sequence.pending for sequence in active):
            raise RuntimeError("a waiting or running session has no turn, or nothing to compute")


def _is_coming(sequence: Sequence) -> bool:
    """Whether the sequence's KV is on its way to the device, or to the host from disk."""
    return sequence.moving is Tier.TO_DEVICE or (sequence.moving is Tier.TO_HOST and not sequence.blocks)
