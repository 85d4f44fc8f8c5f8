"""Which rows run in the next step. Pure planning: no tensors, no clock.

Sequences with a turn are `waiting` (first come, first served) or `running`; the others are `idle`. A step takes the
next token of every sequence that decodes, then as much of the prompts as the token budget allows, then admits from
the queue. When blocks run short, the KV of the session that has been idle longest goes first, then that of the last
in the queue, then the youngest running sequence goes back to the front of the queue; all are computed again later,
nothing is lost. The oldest running sequence is never put back and can have the whole pool, so every turn ends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from app.domain import SessionId
from app.gpu.kv_blocks import BlockId
from app.gpu.kv_cache import KVCache
from app.gpu.segments import Row
from app.gpu.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: its rows, those of one token first, and the block copies (source, target) to make before it."""

    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    """Sequences whose turn has left the queue for the first time."""


class Scheduler:
    """Owns the queue and the running set, and decides whose KV gives way."""

    def __init__(self, cache: KVCache, *, num_layers: int, max_step_tokens: int, max_running: int) -> None:
        self.cache = cache
        self.num_layers = num_layers
        self.max_step_tokens = max_step_tokens
        self.max_running = max_running
        self.waiting: OrderedDict[SessionId, Sequence] = OrderedDict()
        self.running: OrderedDict[SessionId, Sequence] = OrderedDict()
        """Oldest first."""
        self.idle: OrderedDict[SessionId, Sequence] = OrderedDict()
        """Sequences without a turn that hold blocks, longest idle first."""

    @property
    def has_work(self) -> bool:
        """Whether any turn waits or runs."""
        return bool(self.waiting or self.running)

    def enqueue(self, sequence: Sequence) -> None:
        """Put a sequence that has just got a turn at the end of the queue, with at least one token left to compute."""
        self.idle.pop(sequence.session, None)
        self.cache.uncompute(sequence, len(sequence.tokens) - 1)
        self.waiting[sequence.session] = sequence

    def retire(self, sequence: Sequence) -> None:
        """Take a sequence whose turn has ended, or that has just been forked, to the idle ones; it keeps its blocks."""
        self.forget(sequence)
        if sequence.blocks:
            self.idle[sequence.session] = sequence

    def forget(self, sequence: Sequence) -> None:
        """Take a sequence out of every list."""
        for group in (self.waiting, self.running, self.idle):
            group.pop(sequence.session, None)

    def plan(self) -> StepPlan:
        """Choose the rows of the next step and give them the blocks that they write to."""
        plan = StepPlan()
        budget = self.max_step_tokens
        for sequence in sorted(self.running.values(), key=lambda running: running.pending > 1):
            if budget and sequence.session in self.running:  # an earlier one may have put this one back
                budget -= self._add_row(plan, sequence, budget)
        while budget and self.waiting and len(self.running) < self.max_running:
            admitted = self._admit(plan)
            if admitted is None:
                break
            budget -= self._add_row(plan, admitted, budget)
        live = [row for row in plan.rows if row.sequence.session in self.running]
        plan.rows[:] = sorted(live, key=lambda row: row.length > 1)
        return plan

    def _add_row(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        """Plan the sequence's next tokens; returns how many. 0 if it had to give way for want of blocks."""
        length = min(sequence.pending, budget)
        while self.cache.missing(sequence, length) > self.cache.pool.available:
            if self._take_back_blocks() is sequence:
                return 0
        plan.copies.extend(self.cache.reserve(sequence, length))
        first = sequence.computed
        samples, scores = _samples(sequence, first + length), _wants_prompt_scored(sequence)
        plan.rows.append(Row(sequence, first, length, 0, self.num_layers, samples, scores))
        return length

    def _admit(self, plan: StepPlan) -> Sequence | None:
        """Move the head of the queue to the running set if its whole context fits beside what runs already."""
        session, sequence = next(iter(self.waiting.items()))
        found = not sequence.blocks and not _wants_prompt_scored(sequence)
        if found:
            self.cache.match_prefix(sequence)
        headroom = len(self.running)  # one more block for each sequence that grows
        if self.running and not self._evict_idle(self.cache.missing(sequence, sequence.pending) + headroom):
            if found:
                self.cache.uncompute(sequence, 0)
            return None
        del self.waiting[session]
        self.running[session] = sequence
        self._note_start(plan, sequence)
        return sequence

    def _note_start(self, plan: StepPlan, sequence: Sequence) -> None:
        turn = sequence.turn
        assert turn is not None
        if _wants_prompt_scored(sequence):
            turn.prompt_logprobs.clear()  # it was put back halfway and starts again
        turn.tokens_recomputed += max(0, min(sequence.reached, len(sequence.tokens) - 1) - sequence.computed)
        if turn.cached_tokens is None:
            turn.cached_tokens = sequence.computed
            plan.started.append(sequence)

    def _evict_idle(self, needed: int) -> bool:
        """Drop the KV of idle sessions, longest idle first, until `needed` blocks are available.

        False where that cannot be; nothing is dropped in vain then, unless idle sessions share their blocks.
        """
        if self.cache.pool.available + sum(len(sequence.blocks) for sequence in self.idle.values()) < needed:
            return False
        while self.cache.pool.available < needed and self.idle:
            _, sequence = self.idle.popitem(last=False)
            self.cache.uncompute(sequence, 0)
        return self.cache.pool.available >= needed

    def _take_back_blocks(self) -> Sequence:
        """Drop the KV of the sequence that has the weakest claim to it, and return that sequence."""
        if self.idle:
            _, victim = self.idle.popitem(last=False)
        elif holders := [waiting for waiting in self.waiting.values() if waiting.blocks]:
            victim = holders[-1]
        else:
            session, victim = self.running.popitem()
            self.waiting[session] = victim
            self.waiting.move_to_end(session, last=False)
        self.cache.uncompute(victim, 0)
        return victim

    def check_integrity(self) -> None:
        """Raise RuntimeError if a sequence is in two lists, or an idle one has a turn, or a busy one has none."""
        groups = (self.waiting, self.running, self.idle)
        if len(set().union(*groups)) != sum(map(len, groups)):
            raise RuntimeError("a session is in two lists")
        if any(sequence.turn is not None for sequence in self.idle.values()):
            raise RuntimeError("an idle session has a turn")
        if any(s.turn is None or not s.pending for s in [*self.waiting.values(), *self.running.values()]):
            raise RuntimeError("a waiting or running session has no turn, or nothing to compute")


def _wants_prompt_scored(sequence: Sequence) -> bool:
    """Whether the turn still needs logits of prompt tokens, which only computing them gives."""
    turn = sequence.turn
    assert turn is not None
    return turn.sampling.prompt_logprobs is not None and len(turn.prompt_logprobs) < turn.prompt_tokens - 1


def _samples(sequence: Sequence, last: int) -> bool:
    """Whether a row that ends before position `last` yields the next token."""
    assert sequence.turn is not None
    return last == len(sequence.tokens) and sequence.turn.stop.max_tokens > 0
