"""Turns that wait and turns that run, in the order of their claims to the device. Pure planning: no tensors."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from app.domain.values import SessionId
from app.gpu.state.blocks import BlockId
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence, TurnState

AGING_STEPS = 8
"""So many steps that skip a turn count as the prompts of one step. So a turn waits for about eight times as many tokens
of others as it has itself.
"""


@dataclass(frozen=True, slots=True, eq=False)
class ActiveTurn:
    """A turn that waits or runs, and its sequence."""

    sequence: TokenSequence
    turn: TurnState

    @property
    def scores_prompt(self) -> bool:
        """Whether the turn still needs logits of prompt tokens, which only computing them gives."""
        turn = self.turn
        return turn.sampling.prompt_logprobs is not None and len(turn.prompt_logprobs) < turn.prompt_tokens - 1

    def growth(self, block_size: int) -> int:
        """Blocks that the rest of the sequence's tokens and one more need."""
        return max(0, len(self.sequence.tokens) // block_size + 1 - len(self.sequence.blocks))


@dataclass(slots=True)
class StepPlan:
    """One step: its rows, the shortest first, and the block copies (source, target) to make before it."""

    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    started: list[TurnState] = field(default_factory=list)
    """Turns that have left the queue, for the first time or since they were resumed."""
    preempted: bool = False
    """Whether a turn was preempted. After it the plan admits turns only for tenants with fewer; the next plan may find
    room for one.
    """
    skipped: bool = False
    """Whether a later plan has rows that this one skipped, though nothing else changes. Their breakpoints found no
    `STEP_WORK`, their tenant's prompts rest, or another turn gives its blocks once it has run longer.
    """
    looking_at: TokenSequence | None = None
    """The sequence that is planned now. An error that comes meanwhile ends its turn alone."""
    failure: tuple[TokenSequence, Exception] | None = None
    """The sequence whose turn could not be planned, and the error. The rest of the plan holds without it."""


class TurnQueue:
    """Turns that are `waiting`, first come, first served, and those that are `running`, oldest first."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[SessionId, ActiveTurn] = OrderedDict()
        self.running: OrderedDict[SessionId, ActiveTurn] = OrderedDict()
        self.turns: Counter[str] = Counter()
        """How many of each tenant run, for those that have any."""
        self._tenants: Counter[str] = Counter()
        """How many of each tenant run or wait."""
        self._largest: str | None = None
        """The tenant with the most turns that run. None: it has to be found again."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def claims(self, prompts: Iterable[ActiveTurn], prompt_tokens: int) -> list[ActiveTurn]:
        """`prompts`, which run, and the turns that wait, in the order of their claims to a step of `prompt_tokens`.
        First comes the turn with the fewest tokens before its next one (shortest remaining time), then the oldest.
        Each step that skips a turn counts as a part of its tokens, so none starves.
        """
        part = max(1, prompt_tokens // AGING_STEPS)
        return sorted(
            [*prompts, *(active for active in self.waiting.values() if not active.turn.awaits_prefill)],
            key=lambda active: active.sequence.pending - active.turn.skipped * part,
        )

    @property
    def waits_for_others(self) -> bool:
        """Whether a turn waits for another server to compute its prompt."""
        return any(active.turn.awaits_prefill for active in self.waiting.values())

    @property
    def is_shared(self) -> bool:
        """Whether several tenants have turns that wait or run."""
        return len(self._tenants) > 1

    def append(self, active: ActiveTurn) -> None:
        """Put a turn at the end of the queue."""
        self.waiting[active.sequence.session] = active
        _count(self._tenants, active, 1)

    def prepend(self, active: ActiveTurn) -> None:
        """Put a turn at the front of the queue."""
        self.append(active)
        self.waiting.move_to_end(active.sequence.session, last=False)

    def start(self, active: ActiveTurn) -> None:
        """Let a waiting turn run."""
        del self.waiting[active.sequence.session]
        self.running[active.sequence.session] = active
        self._largest = None
        _count(self.turns, active, 1)

    def preempt(self, sequence: TokenSequence) -> None:
        """Put the sequence's turn at the front of the queue if it runs."""
        active = self.running.get(sequence.session)
        if active is not None:
            self.remove(sequence)
            self.prepend(active)

    def remove(self, sequence: TokenSequence) -> None:
        """Forget the sequence's turn, if it waits or runs."""
        waiting = self.waiting.pop(sequence.session, None)
        running = self.running.pop(sequence.session, None)
        if running is not None:
            self._largest = None
            _count(self.turns, running, -1)
        if (active := waiting or running) is not None:
            _count(self._tenants, active, -1)

    def runs(self, sequence: TokenSequence) -> bool:
        """Whether the sequence has a turn that runs."""
        return sequence.session in self.running

    def above_share(self, tenant: str) -> TokenSequence | None:
        """The sequence whose turn stops for one of `tenant`: the youngest that runs, of the tenant with the most turns.
        None unless that tenant has at least two more. So no turn takes its place back by the same right.
        """
        if self._largest is None:
            self._largest = max(self.turns, key=self.turns.__getitem__, default=tenant)
        if self.turns[self._largest] < self.turns[tenant] + 2:
            return None
        running = (active.sequence for active in reversed(self.running.values()))
        return next(sequence for sequence in running if sequence.tenant == self._largest)


def _count(turns: Counter[str], active: ActiveTurn, change: int) -> None:
    tenant = active.sequence.tenant
    turns[tenant] += change
    if not turns[tenant]:
        del turns[tenant]
