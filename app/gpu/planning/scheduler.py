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
- the youngest running sequence, which goes back to the queue: swapped out, or recomputed later where there is no
  lower tier.

The oldest running sequence can have the whole pool. It is preempted only for another tenant, and after it has come
further for some steps. So every turn ends.
"""

from collections.abc import Iterable
from operator import attrgetter

from app.gpu.kv.placement import Placement
from app.gpu.planning.admission import Admission
from app.gpu.planning.drafting import Drafting
from app.gpu.planning.plain import decodes_plainly, note_plain
from app.gpu.planning.prompts import PromptPlanner
from app.gpu.planning.queue import ActiveTurn, TurnQueue, growth
from app.gpu.planning.rows import RowPlanner
from app.gpu.planning.shared_steps import SharedSteps
from app.gpu.planning.step_plan import CannotPlan, StepPlan
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence, TurnState


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
        self.queue = TurnQueue()
        self.shared = SharedSteps(self.queue, shared_prompt_tokens, shared_rows, prompts_rest=prompts_rest)
        self._admission = Admission(placement, self.queue)
        self._rows = RowPlanner(
            placement,
            self._admission,
            self.queue,
            self.shared,
            num_layers=num_layers,
            max_step_tokens=max_step_tokens,
        )
        self._prompts = PromptPlanner(
            self._rows,
            self._admission,
            self.queue,
            self.shared,
            self.headroom,
            block_size=self.cache.pool.block_size,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
        )

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
        self._rows.forget(sequence.session)
        self.queue.remove(sequence)

    def plan(self) -> StepPlan:
        """Choose the rows of the next step and give them the blocks that they write to.

        No rows although there is work: everything waits for moves that are under way. Raises `CannotPlan` for an error
        at one turn, and any other as it is.
        """
        plan = StepPlan(most_turns=self._admission.begin_step())
        self.placement.forget_order()
        self._rows.begin_step()
        try:
            budget, prompts = self._plan_decodes(plan, self.max_step_tokens)
            budget = self._prompts.plan(plan, prompts, budget)
            plan.passed_over |= self._admission.too_early
            plan.rows = [row for row in plan.rows if row.sequence.session in self.queue.running]
            self.drafting.add_drafts(plan, budget, is_shared=self.queue.tenants_running > 1)
        except Exception as error:
            failed = plan.looking_at
            if failed is None:
                raise
            running = self.queue.running
            plan.rows = [row for row in plan.rows if row.sequence.session in running and row.sequence is not failed]
            plan.passed_over = True
            raise CannotPlan(plan, failed) from error
        finally:
            plan.rows.sort(key=attrgetter("length"))
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
        return growth(growing, self.cache.pool.block_size)

    def _plan_decodes(self, plan: StepPlan, budget: int) -> tuple[int, list[ActiveTurn]]:
        """Plan the next token of turns that decode, but for those that rest and that others have preempted. Returns the
        tokens that are left of `budget`, and the turns that run and have more than one token to compute.
        """
        running, whole, rows, prompts = self.queue.running, self._rows.whole_pass, plan.rows, list[ActiveTurn]()
        resting = self.shared.resting()
        for active in list(running.values()):
            plan.looking_at = sequence = active.sequence
            first, end = sequence.computed, len(sequence.tokens)
            if end - first > 1:
                prompts.append(active)
            elif budget > 0 and sequence.session in running and sequence.session not in resting:
                if first < sequence.plain_to or (first == sequence.plain_to and self.cache.extend_plain(sequence)):
                    # What `RowPlanner.add` comes to here: most rows of most steps are such.
                    rows.append(Row(sequence, active.turn, first, 1, whole, True, False))
                    budget -= 1
                elif length := self._rows.add(plan, active, budget):
                    note_plain(active, self.cache)
                    budget -= length
        plan.looking_at = None
        return budget, [active for active in prompts if active.sequence.session in running]

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
        plain = [each for each in self.queue.running.values() if each.sequence.computed < each.sequence.plain_to]
        if not all(decodes_plainly(each, self.cache) for each in plain):
            raise RuntimeError("a running session is said to decode plainly and does not")
