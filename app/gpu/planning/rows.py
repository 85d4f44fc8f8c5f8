"""One row of a step: as much of a turn as it computes now, with the blocks that it writes to. Pure planning."""

from app.domain.breakpoint_work import STEP_WORK
from app.domain.values import SessionId
from app.gpu.kv.placement import Placement
from app.gpu.planning.admission import Admission
from app.gpu.planning.queue import ActiveTurn, TurnQueue
from app.gpu.planning.shared_steps import SharedSteps
from app.gpu.planning.step_plan import StepPlan
from app.gpu.planning.step_work import StepWork
from app.gpu.state.paths import PassPlan, plan_row, work_of
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence


class RowPlanner:
    """Plans rows, each if there are blocks for it and if breakpoints leave it room in the step."""

    def __init__(
        self,
        placement: Placement,
        admission: Admission,
        queue: TurnQueue,
        shared: SharedSteps,
        *,
        num_layers: int,
        max_step_tokens: int,
    ) -> None:
        self.whole_pass = PassPlan(0, num_layers)
        self._placement = placement
        self._cache = placement.tiers.cache
        self._admission = admission
        self._queue = queue
        self._shared = shared
        self._num_layers = num_layers
        self._max_step_tokens = max_step_tokens
        self._work = StepWork(STEP_WORK)

    def begin_step(self) -> None:
        """Begin a step, in which breakpoints have done nothing yet."""
        self._work.begin()

    def forget(self, session: SessionId) -> None:
        """The session's turn has ended or paused."""
        self._work.forget(session)

    def waits(self, plan: StepPlan, sequence: TokenSequence) -> bool:
        """Whether breakpoints of others leave the sequence's row no room in this step. To plan it would be in vain."""
        waits = sequence.watched and self._work.waits(sequence.session)
        plan.passed_over |= waits
        return waits

    def add(self, plan: StepPlan, active: ActiveTurn, budget: int) -> int:
        """Plan the turn's next tokens; returns how many. 0 if it gave way for want of blocks, waits for some, or is
        passed over because breakpoints of others do all that they may in this step.

        A row whose parts a client sees is not cut by the load of others, so it can exceed the budget once in a step.
        """
        sequence, turn = active.sequence, active.turn
        length, path = min(sequence.pending, budget), self.whole_pass
        if self.waits(plan, sequence):
            return 0
        if sequence.watched:
            captured, paused = self._shared.crowded_tokens, self._max_step_tokens
            length, path = plan_row(sequence, turn, self._num_layers, budget=budget, captured=captured, paused=paused)
            work = work_of(path.reached)
            if work and not self._work.take(sequence.session, sequence.tenant, work):
                plan.passed_over = True
                return 0
        queued = len(self._queue.waiting)
        has_room = self._admission.make_room(self._cache.missing(sequence, length), sequence)
        plan.gave_way |= len(self._queue.waiting) > queued
        if not has_room:
            return 0
        if sequence.paused_pass is not None:
            self._placement.tiers.end_pass(sequence)
        plan.copies.extend(self._cache.reserve(sequence, length))
        first = sequence.computed
        if length > 1 or first < turn.prompt_tokens:  # who asks counts the blocks of decoded tokens
            self._placement.note_placed(sequence)
        samples = not path.pauses and active.samples_at(first + length)
        scores = not path.pauses and active.scores_prompt
        plan.rows.append(Row(sequence, turn, first, length, path, samples, scores))
        return length
