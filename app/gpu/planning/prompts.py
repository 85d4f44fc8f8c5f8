"""Which prompts a step computes, and which turns that wait it admits. Pure planning: no tensors."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from app.gpu.planning.admission import Admission, Admitted
from app.gpu.planning.queue import AGING_STEPS, ActiveTurn, TurnQueue, growth
from app.gpu.planning.rows import RowPlanner
from app.gpu.planning.shared_steps import SharedSteps
from app.gpu.planning.shares import TenantShares
from app.gpu.planning.step_plan import StepPlan
from app.gpu.state.sequence import TokenSequence


class PromptPlanner:
    """Plans rows of prompts, nearest to their next token first, and takes turns from the queue for them."""

    def __init__(
        self,
        rows: RowPlanner,
        admission: Admission,
        queue: TurnQueue,
        shared: SharedSteps,
        headroom: Callable[[], int],
        *,
        block_size: int,
        max_step_tokens: int,
        max_running: int,
    ) -> None:
        """`headroom` counts the blocks that sequences which run still need."""
        self._rows = rows
        self._admission = admission
        self._queue = queue
        self._shared = shared
        self._headroom = headroom
        self._block_size = block_size
        self._max_running = max_running
        self._shares = TenantShares(max(1, max_step_tokens // AGING_STEPS), max_step_tokens)

    def plan(self, plan: StepPlan, prompts: Iterable[ActiveTurn], budget: int) -> int:
        """Plan rows of prompts, and admit turns from the queue; returns the tokens that are left of `budget`.

        `prompts`: turns that run and have more than one token to compute.
        """
        most = self._shared.part(budget)
        ordered = self._shares.order(self._queue.claims(prompts, self._shared.prompt_tokens))
        paid_up = self._shared.paid_up(ordered, most, decodes=bool(plan.rows))
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
            plan.looking_at = active.sequence
            left = most - spent - (0 if active is claims[-1] else owed)
            if left > 0 and self._runs(active.sequence):  # no other has preempted it
                length = self._rows.add(plan, active, left)
                self._shares.spend(active.sequence.tenant, length)
                if length:
                    self._shared.spend(active.sequence.tenant, length, left)
                spent += length
        plan.looking_at = None
        return spent

    def _admit(self, plan: StepPlan, claims: deque[ActiveTurn], most: int, shortest: int) -> list[ActiveTurn]:
        """Admit turns until those that run have `most` tokens of prompts; returns these turns, in the order of their
        claims. Those of the claims that it takes besides have been passed over once more. `shortest`: of all prompts.
        """
        chosen, tokens, headroom = list[ActiveTurn](), 0, self._headroom()
        while claims and tokens < most:
            active = claims.popleft()
            plan.looking_at = sequence = active.sequence
            runs = self._runs(sequence)
            if self._rows.waits(plan, sequence) or not (runs or self._admits(plan, active, headroom)):
                active.turn.passed_over += 1
                continue
            chosen.append(active)
            leaves_half = len(chosen) == 1 and sequence.pending > shortest
            tokens += min(sequence.pending, _half(most)) if leaves_half else sequence.pending
            headroom += 0 if runs else growth([sequence], self._block_size)
        plan.looking_at = None
        return chosen

    def _runs(self, sequence: TokenSequence) -> bool:
        return sequence.session in self._queue.running

    def _admits(self, plan: StepPlan, active: ActiveTurn, headroom: int) -> bool:
        """Whether a turn runs now that has waited. Once there is no room for one, none behind it is admitted, but for
        tenants that have fewer.
        """
        tenant = active.sequence.tenant
        turns, queued, last = self._queue.turns_of(tenant), len(self._queue.waiting), None
        if turns >= plan.most_turns and not self._admission.is_promised(active):
            return False
        if plan.gave_way and turns and self._queue.above_share(tenant) is None:
            return False
        if len(self._queue.running) >= self._max_running:
            last = self._queue.above_share(tenant)
            if last is None:
                return False
        admitted = self._admission.admit(active, headroom)
        if admitted is Admitted.NO_ROOM:
            plan.most_turns = turns
            plan.gave_way = len(self._queue.waiting) > queued
        elif admitted is Admitted.YES:
            _note_start(plan, active)
            if last is not None:
                self._queue.preempt(last)  # its KV stays until another session needs the room
        return admitted is Admitted.YES


def _note_start(plan: StepPlan, active: ActiveTurn) -> None:
    """Note how much of its history a turn recomputes, and that it has left the queue."""
    sequence, turn = active.sequence, active.turn
    if active.scores_prompt:
        del turn.prompt_logprobs[sequence.computed :]  # it may have lost its KV halfway
    turn.tokens_recomputed += max(0, min(sequence.reached, len(sequence.tokens) - 1) - sequence.computed)
    if turn.cached_tokens is None:
        turn.cached_tokens = sequence.computed
    if not turn.announced:
        turn.announced = True
        plan.started.append(turn)


def _half(tokens: int) -> int:
    return -(-tokens // 2)
