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

from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

from app.domain.breakpoints import STEP_WORK
from app.gpu.kv.placement import Placement
from app.gpu.planning.admission import Admission
from app.gpu.planning.drafting import Drafting
from app.gpu.planning.queue import Fairness, StepPlan
from app.gpu.sampling import penalise
from app.gpu.state.checkpoints import Checkpoint
from app.gpu.state.paths import PassPlan, plan_ahead, plan_row, work_of
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence


class Scheduler:
    """Owns the queue of turns and what is fair between tenants, and plans steps."""

    def __init__(
        self,
        placement: Placement,
        drafting: Drafting,
        fairness: Fairness,
        *,
        num_layers: int,
        max_step_tokens: int,
        max_running: int,
    ) -> None:
        self.placement = placement
        self.drafting = drafting
        self.cache = placement.tiers.cache
        self.num_layers = num_layers
        self.max_step_tokens = max_step_tokens
        self.fairness, self.queue = fairness, fairness.queue
        self._admission = Admission(placement, self.queue, max_running)
        self._block_size = self.cache.pool.block_size
        self._all_layers = PassPlan(0, num_layers)

    @property
    def has_work(self) -> bool:
        """Whether any turn waits or runs."""
        return bool(self.queue.waiting or self.queue.running)

    def enqueue(self, sequence: TokenSequence, above: Checkpoint | None = None) -> None:
        """Put a turn that has just begun at the end of the queue. The last token of its context is computed even if its
        KV is there: it meets the breakpoints that are armed now. With `above` what is computed begins there.
        """
        first = len(sequence.tokens) - 1 if above is None else above.first
        if above is None or not self.cache.return_above(sequence, above):
            self.placement.tiers.cut(sequence, first)
        sequence.reached = min(sequence.reached, first)
        sequence.interventions.truncate(sequence.reached)
        self.placement.begin_turn(sequence, sequence.active_turn)
        self.queue.append(sequence)

    def requeue(self, sequence: TokenSequence) -> None:
        """Put a turn that is resumed at the front of the queue: it has had its place in it."""
        self.placement.begin_turn(sequence, sequence.active_turn)
        self.queue.prepend(sequence)

    def retire(self, sequence: TokenSequence) -> None:
        """Take a sequence whose turn has ended or paused out of the queue; it keeps its KV."""
        self.fairness.forget(sequence.session)
        self.queue.remove(sequence)
        self.placement.end_turn(sequence)

    def headroom(self) -> int:
        """Blocks that the sequences that run need for the rest of their tokens and one more."""
        # A sequence whose history ends before `fast_path_until` has the block of its next token too.
        running, pool = self.queue.running.values(), self.cache.pool
        return sum([s.blocks_to_come(pool) for s in running if len(s.tokens) >= s.fast_path_until])

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

    def plan_overlapped(self, rows: Sequence[Row], max_model_len: int) -> StepPlan:
        """A plan of the token after the one that each of `rows`, the step that runs, is about to sample. Blocks to
        write to are reserved. Rows that sample their turn's last token have no next one.

        A device waits while the host reads tokens, accounts for them, reports them and plans. So while all rows only
        decode, it gets the next step before the running one ends. Each row takes its token where that step samples it
        (vLLM's asynchronous scheduling, SGLang's overlap scheduler). Edits that are made whatever the token do not
        change that. A stop token or a failure may end a turn in between: then its row was computed in vain.

        No rows if the step can only be planned when the tokens are known. That is so if a row is not of a single token,
        if its breakpoints or its sampling depend on the token, if blocks are short, or if there are drafts. It is so
        too where layers fold: a row that was computed in vain would leave a state that is a token ahead. An error at
        one turn is the plan's `failure`; any other is raised.
        """
        plan = StepPlan()
        if self.drafting.max_tokens or self.cache.pool.state_blocks:
            return plan
        try:
            following, growing = self._follow(plan, rows, max_model_len)
            plan.rows = following if self._grow(plan, growing) else []
        except Exception as error:
            if plan.looking_at is None:
                raise
            plan.failure = plan.looking_at, error
        return plan

    def _follow(self, plan: StepPlan, rows: Sequence[Row], max_model_len: int) -> tuple[list[Row], list[Row]]:
        """The rows after these, none if the tokens have to be known; and those of them that need to be looked at, once
        a block: they write past their fast path.
        """
        following, growing, work = list[Row](), list[Row](), 0
        for row in rows:
            sequence, turn, position, path = row.sequence, row.turn, row.first + row.length, row.path
            plan.looking_at = sequence
            if row.first >= sequence.fast_path_until:
                leads_on = row.length == 1 and row.samples and not row.scores_prompt
                if not leads_on or path.spent:  # a breakpoint that acts once does not meet the next token
                    return [], []
            if turn.is_full(len(sequence.tokens) + 1, max_model_len):
                continue
            if turn.sampling.grammar is not None or penalise(turn.sampling):  # each token depends on the one before
                return [], []
            if position > sequence.fast_path_until:
                ahead = plan_ahead(sequence, turn, position, self.num_layers)
                # Where edits are made to this token alone, nothing looks whether the next has finite numbers.
                if ahead is None or (path.new_edits and not ahead.new_edits):
                    return [], []
                path, work = ahead, work + work_of(ahead.reached)
            following.append(Row(sequence, turn, position, 1, path, True, False))
            if position >= sequence.fast_path_until:
                growing.append(following[-1])
        plan.looking_at = None
        return (following, growing) if work <= STEP_WORK else ([], [])

    def _grow(self, plan: StepPlan, rows: Sequence[Row]) -> bool:
        """Reserve blocks for rows that write past their fast path. False, and none is reserved, if they are short."""
        cache, missing = self.cache, 0
        for row in rows:
            plan.looking_at = row.sequence
            missing += cache.missing(row.sequence, 2)
        if missing > cache.pool.available:
            return False
        for row in rows:
            plan.looking_at = row.sequence
            if not (row.first == row.sequence.fast_path_until and cache.extend_plain(row.sequence)):
                copies = cache.reserve(row.sequence, 2)
                assert not copies  # the step that runs writes to the last block, so no other session holds it
        plan.looking_at = None
        return True

    def give_up(self, rows: Iterable[Row]) -> None:
        """Take back what was reserved for rows that will not run after all. The rows before them still do."""
        for row in rows:
            self.cache.release_blocks(row.sequence, self.cache.pool.blocks_for(row.first))

    def _plan_decodes(self, plan: StepPlan, budget: int) -> tuple[int, list[TokenSequence]]:
        """Plan the next token of turns that decode, except those that rest or were preempted. Returns the tokens that
        are left of `budget`, and the turns that run and have more than one token to compute.

        Most rows run all layers and write to a block that no other session has. That is checked once a block, and noted
        as `fast_path_until`.
        """
        running, rows, prompts = self.queue.running, plan.rows, list[TokenSequence]()
        layers, resting = self._all_layers, self.fairness.resting_rows()
        for sequence in list(running.values()):
            plan.looking_at = sequence
            first, end = sequence.computed, len(sequence.tokens)
            if end - first > 1:
                prompts.append(sequence)
            elif budget > 0 and sequence.session in running and sequence.session not in resting:
                turn = sequence.turn
                assert turn is not None
                if first < sequence.fast_path_until or (
                    first == sequence.fast_path_until and self.cache.extend_plain(sequence)
                ):
                    rows.append(Row(sequence, turn, first, 1, layers, True, False))  # as `_add_row` would
                    budget -= 1
                elif length := self._add_row(plan, sequence, budget):
                    budget -= length
                    if self._is_on_fast_path(sequence):
                        sequence.fast_path_until = (first // self._block_size + 1) * self._block_size
        plan.looking_at = None
        return budget, [sequence for sequence in prompts if sequence.session in running]

    def _plan_prompts(self, plan: StepPlan, prompts: Iterable[TokenSequence], budget: int) -> int:
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
        for sequence in resting:
            sequence.active_turn.skipped += 1
        return spent

    def _plan_claims(self, plan: StepPlan, claims: Sequence[TokenSequence], most: int) -> int:
        """Plan rows of these prompts, and admit those that wait, as far as there is room. Returns how many tokens they
        have: at most `most`, except for one row that may not be cut. A prompt that comes before shorter ones leaves
        them half of the tokens, and takes all that they leave.
        """
        if not claims:
            return 0
        following, shortest = deque(claims), min(each.pending for each in claims)
        headroom, pool, left, spent = self.headroom(), self.cache.pool, most, 0
        first: TokenSequence | None = None  # it comes before shorter ones, and `kept` tokens are kept for it
        kept, has_first = 0, False
        while left > 0 and (following or first is not None):
            if first is not None and (left <= kept or not following):
                if self.queue.runs(first):  # it has not given its place away
                    following.appendleft(first)
                first, kept = None, 0
                continue
            plan.looking_at = sequence = following.popleft()
            grown = sequence.blocks_to_come(pool) if (runs := self.queue.runs(sequence)) else 0
            if self._waits(plan, sequence) or not (runs or self._admission.admit(sequence, plan, headroom)):
                sequence.active_turn.skipped += 1
                continue
            if not (has_first or spent) and sequence.pending > shortest:
                first, kept, has_first = sequence, min(sequence.pending, -(-most // 2)), True
            elif self.queue.runs(sequence):
                length = self._add_row(plan, sequence, left - kept)
                if length:
                    self.fairness.spend_tokens(sequence.tenant, length, left - kept)
                spent += length
                # Where blocks are short, more rows would only take them from each other.
                left = left - length if length or not plan.preempted else kept
            headroom += sequence.blocks_to_come(pool) - grown
        for sequence in following:
            sequence.active_turn.skipped += 1
        plan.looking_at = None
        return spent

    def _waits(self, plan: StepPlan, sequence: TokenSequence) -> bool:
        """Whether breakpoints of others leave the sequence's row no room in this step."""
        waits = sequence.watched and self.fairness.waits_for_work(sequence.session)
        plan.skipped |= waits
        return waits

    def _add_row(self, plan: StepPlan, sequence: TokenSequence, budget: int) -> int:
        """Plan the turn's next tokens; returns how many. 0 if it was preempted, waits for blocks, or is skipped because
        breakpoints of others do all that they may in this step.

        A row whose parts a client sees is not cut by the load of others, so it can exceed the budget once in a step.
        """
        turn = sequence.active_turn
        if self.cache.state_every:
            budget = self.cache.to_kept_end(sequence, budget)
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
            sequence.outgoing = None  # copies under way read blocks that the pass had half written
        plan.copies.extend(self.cache.reserve(sequence, length))
        first = sequence.computed
        if length > 1 or first < turn.prompt_tokens:  # who asks counts the blocks of decoded tokens
            self.placement.note_placed(sequence)
        samples = not path.pauses and first + length == len(sequence.tokens) and turn.stop.max_tokens > 0
        scores = not path.pauses and turn.scores_prompt
        plan.rows.append(Row(sequence, turn, first, length, path, samples, scores))
        return length

    def _is_on_fast_path(self, sequence: TokenSequence) -> bool:
        """Whether the turn's next rows are one token each, with nothing to do on the way, up to the end of the block
        that they write to.
        """
        turn = sequence.active_turn
        if sequence.watched or turn.scores_prompt or turn.stop.max_tokens == 0:
            return False
        return self.cache.is_ready(sequence)
