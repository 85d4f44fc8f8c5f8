"""Turns that wait and turns that run, in the order of their claims to the device. Pure planning: no tensors."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from app.domain.values import SessionId
from app.gpu.state.sequence import TokenSequence, TurnState

AGING_STEPS = 8
"""In so many steps that pass over a turn it comes nearer by the prompts of one step: it waits for about eight times as
many tokens of others as it has itself.
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

    def samples_at(self, end: int) -> bool:
        """Whether a row that ends before position `end` yields the next token."""
        return end == len(self.sequence.tokens) and self.turn.stop.max_tokens > 0


class TurnQueue:
    """Turns that are `waiting`, first come, first served, and those that are `running`, oldest first."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[SessionId, ActiveTurn] = OrderedDict()
        self.running: OrderedDict[SessionId, ActiveTurn] = OrderedDict()
        self._turns: Counter[str] = Counter()
        """How many of each tenant run."""
        self._tenants: Counter[str] = Counter()
        """How many of each tenant run or wait."""
        self._largest: str | None = None
        """The tenant with the most; None: to be found anew."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def claims(self, prompts: Iterable[ActiveTurn], prompt_tokens: int) -> list[ActiveTurn]:
        """Turns that run and have `prompts` to compute, and those that wait to compute theirs, in the order of their
        claims to a step with `prompt_tokens`: the one with the fewest tokens to its next one comes first (shortest
        remaining time), then who came first. Each step that passes over a turn counts as a part of its tokens, so that
        none starves.
        """
        part = max(1, prompt_tokens // AGING_STEPS)
        return sorted(
            [*prompts, *(active for active in self.waiting.values() if not active.turn.awaits_prefill)],
            key=lambda active: active.sequence.pending - active.turn.passed_over * part,
        )

    @property
    def waits_for_others(self) -> bool:
        """Whether a turn waits for another server to compute its prompt."""
        return any(active.turn.awaits_prefill for active in self.waiting.values())

    @property
    def tenants_running(self) -> int:
        """How many tenants have turns that run."""
        return len(self._turns)

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
        self._count_running(active, 1)

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
            self._count_running(running, -1)
        if (active := waiting or running) is not None:
            _count(self._tenants, active, -1)

    def turns_of(self, tenant: str) -> int:
        """How many turns of the tenant run."""
        return self._turns[tenant]

    def above_share(self, tenant: str) -> TokenSequence | None:
        """The sequence whose turn stops for one of `tenant`: the youngest that runs, of the tenant with the most turns.

        None unless these are at least two more: so no turn takes its place back by the same right.
        """
        if self._largest is None:
            self._largest = max(self._turns, key=self._turns.__getitem__, default=tenant)
        if self._turns[self._largest] < self._turns[tenant] + 2:
            return None
        running = (active.sequence for active in reversed(self.running.values()))
        return next(sequence for sequence in running if sequence.tenant == self._largest)

    def _count_running(self, active: ActiveTurn, change: int) -> None:
        _count(self._turns, active, change)
        self._largest = None


def growth(sequences: Iterable[TokenSequence], block_size: int) -> int:
    """Blocks that sequences need for the rest of their tokens and one more. Asked of all that run, at every signal."""
    total = 0
    for sequence in sequences:
        missing = len(sequence.tokens) // block_size + 1 - len(sequence.blocks)
        if missing > 0:
            total += missing
    return total


def _count(turns: Counter[str], active: ActiveTurn, change: int) -> None:
    tenant = active.sequence.tenant
    turns[tenant] += change
    if not turns[tenant]:
        del turns[tenant]
