"""What one step is to do. Pure planning: no tensors."""

import math
from dataclasses import dataclass, field

from app.gpu.state.blocks import BlockId
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence, TurnState


@dataclass(slots=True)
class StepPlan:
    """One step: its rows, the shortest first, and the block copies (source, target) to make before it."""

    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    started: list[TurnState] = field(default_factory=list)
    """Turns that have left the queue, for the first time or since they were resumed."""
    gave_way: bool = False
    """Whether a turn was preempted. Then only tenants with fewer have one admitted after it, and the next plan may find
    room for one.
    """
    passed_over: bool = False
    """Whether rows were left out that a later plan has, though nothing else changes: for want of `STEP_WORK`, because
    their tenant has had its part of the step before, or for want of blocks that another gives once it has run longer.
    """
    most_turns: float = math.inf
    """Only tenants with fewer turns that run have one admitted. There was no room for one of a tenant with so many."""
    looking_at: TokenSequence | None = None
    """Whose turn is being planned now: an error that comes meanwhile ends that turn alone. None: no turn's."""


class CannotPlan(Exception):
    """Planning has failed at the turn of `sequence`. `plan` has what was planned before it, and holds without it."""

    def __init__(self, plan: StepPlan, sequence: TokenSequence) -> None:
        super().__init__(f"the turn of session {sequence.session} could not be planned")
        self.plan = plan
        self.sequence = sequence
