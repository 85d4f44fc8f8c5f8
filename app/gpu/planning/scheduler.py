"""Which rows run in the next step. Pure planning: no tensors.

1. Every sequence that decodes gets its next token.
2. Prompts get the rest of the token budget, or a part of it while other turns wait for the step to end. The prompt
   nearest to its next token comes first (`TurnQueue.claims`), so a short question does not wait for long first prompts.
   Tenants take turns (`Fairness`). A waiting turn is admitted when its prompt's time comes (`Admission`).
3. Drafts may get what is left of the budget (`Drafting`).

When blocks run short, KV gives way in this order:

- KV of sessions without a turn, which `Placement` has;
- KV of turns of the tenant that holds the most, for a tenant that holds less;
- KV of the last in the queue;
- the youngest running sequence, which goes back to the queue: swapped out, or recomputed later where there is no
  lower tier.

The oldest running sequence can have the whole pool. It is preempted only for another tenant, after some steps of
progress. So every turn ends.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from app.gpu.kv.placement import Placement
from app.gpu.planning.admission import Admission
from app.gpu.planning.drafting import Drafting
from app.gpu.planning.fairness import Fairness
from app.gpu.planning.queue import ActiveTurn, StepPlan, TurnQueue
from app.gpu.state.paths import PassPlan, plan_row, work_of
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence, TurnState


class Scheduler:
    """Owns the queue of turns and what is fair between tenants, and plans steps."""

    def __init__(
        self,
        placement: Placement,
        drafting: Drafting,
        *,
        num_layers: int,
        max_step_tokens: int,
        max_running: int,
        shared_prompt_tokens: int,
        shared_rows: int,
        prompts_rest: bool,
    ) -> None:
        """`shared_prompt_tokens`, `shared_rows` and `prompts_rest` are for steps that several turns share, as
        `Fairness` has them.
        """
        self.placement = placement
        self.drafting = drafting
        self.cache = placement.tiers.cache
        self.num_layers = num_layers
        self.max_step_tokens = max_step_tokens
        self.queue = TurnQueue()
        self.fairness = Fairness(
            self.queue, prompt_tokens=shared_prompt_tokens, rows=shared_rows, prompts_rest=prompts_rest
        )
        self._admission = Admission(placement, self.queue, max_running)
        self._block_size = self.cache.pool.block_size
        self._all_layers = PassPlan(0, num_layers)

    @property
    def has_work(self) -> bool:
        """Whether any turn waits or runs."""
        return bool(self.queue.waiting or self.queue.running)

    def enqueue(self, sequence: TokenSequence, turn: TurnState) -> None:
        """Put a turn that has just begun at the end of the queue. The last token of its context is computed even if its
        KV is there: it meets the breakpoints that are armed now.
        """
        last = len(sequence.tokens) - 1
        self.placement.tiers.cut(sequence, last)
        sequence.reached = min(sequence.reached, last)
        sequence.interventions.truncate(sequence.reached)
        self.placement.begin_turn(sequence, turn)
        self.queue.append(ActiveTurn(sequence, turn))

    def requeue(self, sequence: TokenSequence, turn: TurnState) -> None:
        """Put a turn that is resumed at the front of the queue: it has had its place in it."""
        self.placement.begin_turn(sequence, turn)
        self.queue.prepend(ActiveTurn(sequence, turn))

    def retire(self, sequence: TokenSequence) -> None:
        """Take a sequence whose turn has ended or paused out of the queue; it keeps its KV."""
        self.forget(sequence)
        self.placement.end_turn(sequence)

    def forget(self, sequence: TokenSequence) -> None:
        """Take a sequence out of the queue and the running set."""
        self.fairness.forget(sequence.session)
        self.queue.remove(sequence)

    def headroom(self) -> int:
        """Blocks that the sequences that run need for the rest of their tokens and one more."""
        # A sequence whose history ends before `fast_path_until` has the block of its next token too.
        running, size = self.queue.running.values(), self._block_size
        return sum([a.growth(size) for a in running if len((s := a.sequence).tokens) >= s.fast_path_until])

    def plan(self) -> StepPlan:
        """Choose the rows of the next step and give them the blocks that they write to.

        No rows although there is work: everything waits for moves that are under way. An error at one turn is the
        plan's `failure`; any other is raised.
        """
        plan, running = StepPlan(), self.queue.running
        self._admission.begin_step()
        self.placement.forget_order()
        self.fairness.begin_step()
        try:
            budget, prompts = self._plan_decodes(plan, self.max_step_tokens)
            budget -= self._plan_prompts(plan, prompts, budget)
            plan.skipped |= self._admission.too_early
            plan.rows = [row for row in plan.rows if row.sequence.session in running]
            self.drafting.add_drafts(plan, budget, is_shared=len(self.queue.turns) > 1)
        except Exception as error:
            failed = plan.looking_at
            if failed is None:
                raise
            plan.rows = [row for row in plan.rows if row.sequence.session in running and row.sequence is not failed]
            plan.skipped = True
            plan.failure = failed, error
        plan.rows.sort(key=attrgetter("length"))
        return plan

    def give_up(self, rows: Iterable[Row]) -> None:
        """Take back what was reserved for rows that will not run after all. The rows before them still do."""
        for row in rows:
            self.cache.release_blocks(row.sequence, self.cache.pool.blocks_for(row.first))

    def _plan_decodes(self, plan: StepPlan, budget: int) -> tuple[int, list[ActiveTurn]]:
        """Plan the next token of turns that decode, except those that rest or were preempted. Returns the tokens that
        are left of `budget`, and the turns that run and have more than one token to compute.

        Most rows run all layers and write to a block that no other session has. That is checked once a block, and noted
        as `fast_path_until`.
        """
        running, rows, prompts = self.queue.running, plan.rows, list[ActiveTurn]()
        layers, resting = self._all_layers, self.fairness.resting_rows()
        for active in list(running.values()):
            plan.looking_at = sequence = active.sequence
            first, end = sequence.computed, len(sequence.tokens)
            if end - first > 1:
                prompts.append(active)
            elif budget > 0 and sequence.session in running and sequence.session not in resting:
                if first < sequence.fast_path_until or (
                    first == sequence.fast_path_until and self.cache.extend_plain(sequence)
                ):
                    rows.append(Row(sequence, active.turn, first, 1, layers, True, False))  # as `_add_row` would
                    budget -= 1
                elif length := self._add_row(plan, active, budget):
                    budget -= length
                    if self._is_on_fast_path(active):
                        sequence.fast_path_until = (first // self._block_size + 1) * self._block_size
        plan.looking_at = None
        return budget, [active for active in prompts if active.sequence.session in running]

    def _plan_prompts(self, plan: StepPlan, prompts: Iterable[ActiveTurn], budget: int) -> int:
        """Plan rows of `prompts`, which run already, and admit turns from the queue; returns how many tokens these have
        of `budget`.
        """
        most = self.fairness.prompt_part(budget)
        claims = self.queue.claims(prompts, self.fairness.prompt_tokens)
        claims, resting = self.fairness.prompts_in_turn(claims, decodes=bool(plan.rows))
        plan.skipped |= bool(resting)
        spent = self._plan_claims(plan, claims, most)
        if resting and not (plan.rows or plan.preempted):  # the others wait for their KV
            return self._plan_claims(plan, resting, most)
        for active in resting:
            active.turn.skipped += 1
        return spent

    def _plan_claims(self, plan: StepPlan, claims: Sequence[ActiveTurn], most: int) -> int:
        """Plan rows of these prompts, and admit those that wait, as far as there is room. Returns how many tokens they
        have: at most `most`, except for one row that may not be cut. A prompt that comes before shorter ones leaves
        them half of the tokens, and takes all that they leave.
        """
        if not claims:
            return 0
        shortest = min(active.sequence.pending for active in claims)
        headroom, size, left = self.headroom(), self._block_size, most
        first, owed, spent = None, 0, 0
        following = iter(claims)
        while left > 0 and (active := next(following, None)) is not None:
            plan.looking_at = sequence = active.sequence
            grown = active.growth(size) if (runs := self.queue.runs(sequence)) else 0
            if self._waits(plan, sequence) or not (runs or self._admission.admit(active, plan, headroom)):
                active.turn.skipped += 1
                continue
            if first is None and not spent and sequence.pending > shortest:
                first, owed = active, min(sequence.pending, -(-most // 2))
                left -= owed
            elif self.queue.runs(sequence):  # it has not given its place away
                length = self._add_prompt(plan, active, left)
                spent += length
                # Where blocks are short, more rows would only take them from each other.
                left = left - length if length or not plan.preempted else 0
            headroom += active.growth(size) - grown
        for active in following:
            active.turn.skipped += 1
        if first is not None and self.queue.runs(first.sequence) and left + owed > 0:
            plan.looking_at = first.sequence
            spent += self._add_prompt(plan, first, left + owed)
        plan.looking_at = None
        return spent

    def _add_prompt(self, plan: StepPlan, active: ActiveTurn, left: int) -> int:
        """Plan a row of a prompt, which has `left` tokens of the step; returns how many it takes."""
        length = self._add_row(plan, active, left)
        if length:
            self.fairness.spend_tokens(active.sequence.tenant, length, left)
        return length

    def _waits(self, plan: StepPlan, sequence: TokenSequence) -> bool:
        """Whether breakpoints of others leave the sequence's row no room in this step."""
        waits = sequence.watched and self.fairness.waits_for_work(sequence.session)
        plan.skipped |= waits
        return waits

    def _add_row(self, plan: StepPlan, active: ActiveTurn, budget: int) -> int:
        """Plan the turn's next tokens; returns how many. 0 if it was preempted, waits for blocks, or is skipped because
        breakpoints of others do all that they may in this step.

        A row whose parts a client sees is not cut by the load of others, so it can exceed the budget once in a step.
        """
        sequence, turn = active.sequence, active.turn
        length, path = min(sequence.pending, budget), self._all_layers
        if self._waits(plan, sequence):
            return 0
        if sequence.watched:
            captured, paused = self.fairness.crowded_tokens, self.max_step_tokens
            length, path = plan_row(sequence, turn, self.num_layers, budget=budget, captured=captured, paused=paused)
            work = work_of(path.reached)
            if work and not self.fairness.take_work(sequence.session, sequence.tenant, work):
                plan.skipped = True
                return 0
        queued = len(self.queue.waiting)
        has_room = self._admission.make_room(self.cache.missing(sequence, length), sequence)
        plan.preempted |= len(self.queue.waiting) > queued
        if not has_room:
            return 0
        if sequence.paused_pass is not None:
            self.placement.tiers.end_pass(sequence)
        plan.copies.extend(self.cache.reserve(sequence, length))
        first = sequence.computed
        if length > 1 or first < turn.prompt_tokens:  # who asks counts the blocks of decoded tokens
            self.placement.note_placed(sequence)
        samples = not path.pauses and first + length == len(sequence.tokens) and turn.stop.max_tokens > 0
        scores = not path.pauses and active.scores_prompt
        plan.rows.append(Row(sequence, turn, first, length, path, samples, scores))
        return length

    def _is_on_fast_path(self, active: ActiveTurn) -> bool:
        """Whether the turn's next rows are one token each, with nothing to do on the way, up to the end of the block
        that they write to.
        """
        if active.sequence.watched or active.scores_prompt or active.turn.stop.max_tokens == 0:
            return False
        return self.cache.is_ready(active.sequence)

    def check_integrity(self) -> None:
        """Raise RuntimeError if a sequence is in two lists, or one at rest is busy, or a busy one has nothing to do."""
        resident, away = self.placement.resident, self.placement.away
        groups = [set(group) for group in (self.queue.waiting, self.queue.running, resident, away)]
        if len(set().union(*groups)) != sum(map(len, groups)):
            raise RuntimeError("a session is in two lists")
        if any(sequence.busy for sequence in (*resident.values(), *away.values())):
            raise RuntimeError("a session that is placed has a turn that is not paused")
        active = [each.sequence for each in (*self.queue.waiting.values(), *self.queue.running.values())]
        if any(not sequence.busy or not sequence.pending for sequence in active):
            raise RuntimeError("a waiting or running session has no turn, or nothing to compute")
        running = self.queue.running.values()
        fast = [each for each in running if each.sequence.computed < each.sequence.fast_path_until]
        if not all(map(self._is_on_fast_path, fast)):
            raise RuntimeError("a running session is said to be on the fast path and is not")
