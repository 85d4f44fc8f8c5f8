"""Which rows run in the next step. Pure planning: no tensors.

A step takes the next token of every sequence that decodes, then as much of the prompts as the token budget allows. Of
prompts that are computed and turns that wait, the nearest to its next token comes first, so that a turn that goes on
with its conversation does not wait for long first prompts. Who is passed over comes nearer (`TurnQueue.claims`). That
is the order within a tenant; tenants take turns by tokens (`TenantShares`). While there are other turns, prompts have
at most a part of a step: a turn that comes meanwhile waits for no more than that. What is left of the budget may go to
drafts (`Drafting`). A sequence whose KV is on its way back to the device is passed by those behind it. When blocks run
short, KV gives way in this order:

- KV of sessions without a turn, which `Placement` has;
- KV of turns of the tenant that holds the most, for a tenant that holds less (`RoomShares`);
- KV of the last in the queue;
- the youngest running sequence, which goes back to the queue: swapped out, or computed again later where there is no
  lower tier.

The oldest running sequence can have the whole pool. It is preempted only for another tenant, and after it has come
further for some steps. So every turn ends.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

from app.domain.breakpoint_work import STEP_WORK
from app.gpu.kv_tiers.placement import Placement
from app.gpu.passes.pass_plan import PassPlan
from app.gpu.passes.segments import Row
from app.gpu.passes.ways import RowLimits, plan_row
from app.gpu.passes.work import work_of_way
from app.gpu.planning.admission import Admission, Admitted
from app.gpu.planning.drafting import Drafting
from app.gpu.planning.plain import decodes_plainly, note_plain
from app.gpu.planning.queue import AGING_STEPS, ActiveTurn, TurnQueue
from app.gpu.planning.shared_steps import SharedSteps
from app.gpu.planning.shares import TenantShares
from app.gpu.planning.step_plan import StepPlan
from app.gpu.planning.step_work import StepWork
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState


class Scheduler:
    """Owns the queue of turns, and plans their steps."""

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
        `SharedSteps` has them.
        """
        self.placement = placement
        self.drafting = drafting
        self.cache = placement.tiers.cache
        self.num_layers = num_layers
        self.max_step_tokens = max_step_tokens
        self.max_running = max_running
        self._whole_pass = PassPlan(0, num_layers)
        self.queue = TurnQueue()
        self.shared = SharedSteps(self.queue, shared_prompt_tokens, shared_rows, prompts_rest=prompts_rest)
        self._admission = Admission(placement, self.queue)
        self._shares = TenantShares(max(1, max_step_tokens // AGING_STEPS), max_step_tokens)
        self._work = StepWork(STEP_WORK)

    @property
    def has_work(self) -> bool:
        """Whether any turn waits or runs."""
        return bool(self.queue.waiting or self.queue.running)

    def enqueue(self, sequence: TokenSequence, turn: TurnState) -> None:
        """Put a turn that has just begun at the end of the queue, with at least one token left to compute: the last of
        the context, which meets the breakpoints that are armed now.
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
        self._work.forget(sequence.session)
        self.queue.remove(sequence)

    def plan(self) -> StepPlan:
        """Choose the rows of the next step and give them the blocks that they write to.

        No rows although there is work: everything waits for moves that are under way.
        """
        plan = StepPlan(most_turns=self._admission.begin_step())
        self.placement.forget_order()
        self._work.begin()
        budget, prompts = self._plan_decodes(plan, self.max_step_tokens)
        budget = self._plan_prompts(plan, prompts, budget)
        plan.passed_over |= self._admission.too_early
        live = [row for row in plan.rows if row.sequence.session in self.queue.running]
        drafted = self.drafting.add_drafts(live, budget, is_shared=self.queue.tenants_running > 1)
        plan.rows[:] = sorted(drafted, key=attrgetter("length"))
        return plan

    def give_up(self, rows: Iterable[Row]) -> None:
        """Take back what was reserved for rows that will not run after all. The rows before them still do."""
        for row in rows:
            self.cache.release_blocks(row.sequence, self.cache.pool.blocks_for(row.first))

    def headroom(self) -> int:
        """Blocks that the sequences that run need for the rest of their tokens and one more."""
        # A sequence whose history ends before `plain_to` has the block of its next token too.
        running = self.queue.running.values()
        growing = [s for active in running if len((s := active.sequence).tokens) >= s.plain_to]
        return _growth(growing, self.cache.pool.block_size)

    def _plan_decodes(self, plan: StepPlan, budget: int) -> tuple[int, list[ActiveTurn]]:
        """Plan the next token of turns that decode, but for those that rest and that others have preempted. Returns the
        tokens that are left of `budget`, and the turns that run and have more than one token to compute.
        """
        running, whole, rows, prompts = self.queue.running, self._whole_pass, plan.rows, list[ActiveTurn]()
        resting = self.shared.resting()
        for active in list(running.values()):
            sequence = active.sequence
            first, end = sequence.computed, len(sequence.tokens)
            if end - first > 1:
                prompts.append(active)
            elif budget > 0 and sequence.session in running and sequence.session not in resting:
                if first < sequence.plain_to or (first == sequence.plain_to and self.cache.extend_plain(sequence)):
                    # What `_add_row` comes to here: most rows of most steps are such.
                    rows.append(Row(sequence, active.turn, first, 1, whole, True, False))
                    budget -= 1
                elif length := self._add_row(plan, active, budget):
                    note_plain(active, self.cache)
                    budget -= length
        return budget, [active for active in prompts if active.sequence.session in running]

    def _plan_prompts(self, plan: StepPlan, prompts: Iterable[ActiveTurn], budget: int) -> int:
        """Plan rows of prompts, and admit turns from the queue; returns the tokens that are left of `budget`.

        `prompts`: turns that run and have more than one token to compute.
        """
        most = self.shared.part(budget)
        ordered = self._shares.order(self.queue.claims(prompts, self.shared.prompt_tokens))
        paid_up = self.shared.paid_up(ordered, most, decodes=bool(plan.rows))
        plan.passed_over |= len(paid_up) < len(ordered)
        spent = self._plan_claims(plan, paid_up, most)
        if not (plan.rows or plan.gave_way) and len(paid_up) < len(ordered):  # those that are free wait for their KV
            free = set(paid_up)
            spent = self._plan_claims(plan, [active for active in ordered if active not in free], most)
        return budget - spent

    def _plan_claims(self, plan: StepPlan, ordered: Sequence[ActiveTurn], most: int) -> int:
        """Plan rows of these prompts, and admit those that wait; returns how many tokens they have."""
        shortest = min((active.sequence.pending for active in ordered), default=0)
        claims, spent = deque(ordered), 0
        # What breakpoints keep a row from is for those behind it: they may be another tenant's.
        while claims and spent < most and (chosen := self._admit(plan, claims, most - spent, shortest)):
            spent += self._add_prompts(plan, chosen, most - spent)
            if plan.gave_way:
                break  # blocks are short: more rows would only take them from each other
        for active in claims:
            active.turn.passed_over += 1
        return spent

    def _add_prompts(self, plan: StepPlan, claims: Sequence[ActiveTurn], most: int) -> int:
        """Plan rows of these prompts; returns how many tokens they have, `most` at most but for a single row."""
        spent = owed = 0
        if claims[0].sequence.pending > min(active.sequence.pending for active in claims):
            # It or its tenant has been passed over: the shorter ones leave it half, and it takes all that they leave.
            owed = min(claims[0].sequence.pending, _half(most))
            claims = [*claims[1:], claims[0]]
        for active in claims:
            left = most - spent - (0 if active is claims[-1] else owed)
            if left > 0 and self._runs(active.sequence):  # no other has preempted it
                length = self._add_row(plan, active, left)
                self._shares.spend(active.sequence.tenant, length)
                if length:
                    self.shared.spend(active.sequence.tenant, length, left)
                spent += length
        return spent

    def _admit(self, plan: StepPlan, claims: deque[ActiveTurn], most: int, shortest: int) -> list[ActiveTurn]:
        """Admit turns until those that run have `most` tokens of prompts; returns these turns, in the order of their
        claims. Those of the claims that it takes besides have been passed over once more. `shortest`: of all prompts.
        """
        chosen, tokens, headroom = list[ActiveTurn](), 0, self.headroom()
        while claims and tokens < most:
            active = claims.popleft()
            sequence = active.sequence
            runs = self._runs(sequence)
            if self._waits_for_work(plan, sequence) or not (runs or self._admits(plan, active, headroom)):
                active.turn.passed_over += 1
                continue
            chosen.append(active)
            leaves_half = len(chosen) == 1 and sequence.pending > shortest
            tokens += min(sequence.pending, _half(most)) if leaves_half else sequence.pending
            headroom += 0 if runs else _growth([sequence], self.cache.pool.block_size)
        return chosen

    def _runs(self, sequence: TokenSequence) -> bool:
        return sequence.session in self.queue.running

    def _admits(self, plan: StepPlan, active: ActiveTurn, headroom: int) -> bool:
        """Whether a turn runs now that has waited. Once there is no room for one, none behind it is admitted, but for
        tenants that have fewer.
        """
        tenant = active.sequence.tenant
        turns, queued, last = self.queue.turns_of(tenant), len(self.queue.waiting), None
        if turns >= plan.most_turns and not self._admission.is_promised(active):
            return False
        if plan.gave_way and turns and self.queue.above_share(tenant) is None:
            return False
        if len(self.queue.running) >= self.max_running:
            last = self.queue.above_share(tenant)
            if last is None:
                return False
        admitted = self._admission.admit(active, headroom)
        if admitted is Admitted.NO_ROOM:
            plan.most_turns = turns
            plan.gave_way = len(self.queue.waiting) > queued
        elif admitted is Admitted.YES:
            self._note_start(plan, active)
            if last is not None:
                self.queue.preempt(last)  # its KV stays as long as nobody needs the room
        return admitted is Admitted.YES

    def _add_row(self, plan: StepPlan, active: ActiveTurn, budget: int) -> int:
        """Plan the turn's next tokens; returns how many. 0 if it gave way for want of blocks, waits for some, or is
        passed over because breakpoints of others do all that they may in this step.

        A row whose parts a client sees is cut by nobody else's load, so it can exceed the budget once in a step.
        """
        sequence, turn = active.sequence, active.turn
        length, way = min(sequence.pending, budget), self._whole_pass
        if self._waits_for_work(plan, sequence):
            return 0
        if sequence.watched:
            limits = RowLimits(self.max_step_tokens, self.shared.crowded_tokens, budget)
            length, way = plan_row(sequence, turn, self.num_layers, limits)
            work = work_of_way(way)
            if work and not self._work.take(sequence.session, sequence.tenant, work):
                plan.passed_over = True
                return 0
        queued = len(self.queue.waiting)
        has_room = self._admission.make_room(self.cache.missing(sequence, length), sequence)
        plan.gave_way |= len(self.queue.waiting) > queued
        if not has_room:
            return 0
        if sequence.paused_pass is not None:
            self.placement.tiers.end_pass(sequence)
        plan.copies.extend(self.cache.reserve(sequence, length))
        first = sequence.computed
        if length > 1 or first < turn.prompt_tokens:  # who asks counts the blocks of decoded tokens
            self.placement.note_placed(sequence)
        samples = not way.pauses and active.samples_at(first + length)
        scores = not way.pauses and active.scores_prompt
        plan.rows.append(Row(sequence, turn, first, length, way, samples, scores))
        return length

    def _waits_for_work(self, plan: StepPlan, sequence: TokenSequence) -> bool:
        """Whether breakpoints of others leave the sequence's row no room in this step. To plan it would be in vain."""
        waits = sequence.watched and self._work.waits(sequence.session)
        plan.passed_over |= waits
        return waits

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

    def check_integrity(self) -> None:
        """Raise RuntimeError if a sequence is in two lists, or one at rest is busy, or a busy one has nothing to do."""
        resident, away = self.placement.resident, self.placement.lower.away
        groups = [set(group) for group in (self.queue.waiting, self.queue.running, resident, away)]
        if len(set().union(*groups)) != sum(map(len, groups)):
            raise RuntimeError("a session is in two lists")
        if any(sequence.busy for sequence in (*resident.values(), *away.values())):
            raise RuntimeError("a session that is placed has a turn that is not paused")
        active = [each.sequence for each in (*self.queue.waiting.values(), *self.queue.running.values())]
        if any(not sequence.busy or not sequence.pending for sequence in active):
            raise RuntimeError("a waiting or running session has no turn, or nothing to compute")
        plain = [each for each in self.queue.running.values() if each.sequence.computed < each.sequence.plain_to]
        if not all(decodes_plainly(each, self.cache) for each in plain):
            raise RuntimeError("a running session is said to decode plainly and does not")


def _growth(sequences: Iterable[TokenSequence], block_size: int) -> int:
    """Blocks that sequences need for the rest of their tokens and one more. Asked of all that run, at every signal."""
    total = 0
    for sequence in sequences:
        missing = len(sequence.tokens) // block_size + 1 - len(sequence.blocks)
        if missing > 0:
            total += missing
    return total


def _half(tokens: int) -> int:
    return -(-tokens // 2)
