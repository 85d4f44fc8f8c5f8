"""Turns that wait and turns that run, in the order of their claims to the device. Pure planning: no tensors."""

from collections import OrderedDict
from dataclasses import dataclass

from app.domain.values import SessionId, Tier
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState

AGING_STEPS = 8
"""In so many steps that pass over a turn it comes nearer by the tokens of one step."""


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

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def claims(self, step_tokens: int) -> list[ActiveTurn]:
        """Turns that have prompts to compute or wait, in the order of their claims to a step of `step_tokens`: the one
        with the fewest tokens to its next one comes first (shortest remaining time), then who came first. Each step
        that passes over a turn counts as a part of its tokens, so that none starves.
        """
        part = max(1, step_tokens // AGING_STEPS)
        prompts = [active for active in self.running.values() if active.sequence.pending > 1]
        return sorted(
            [*prompts, *self.waiting.values()],
            key=lambda active: active.sequence.pending - active.turn.passed_over * part,
        )

    def append(self, active: ActiveTurn) -> None:
        """Put a turn at the end of the queue."""
        self.waiting[active.sequence.session] = active

    def prepend(self, active: ActiveTurn) -> None:
        """Put a turn at the front of the queue."""
        self.append(active)
        self.waiting.move_to_end(active.sequence.session, last=False)

    def start(self, active: ActiveTurn) -> None:
        """Let a waiting turn run."""
        del self.waiting[active.sequence.session]
        self.running[active.sequence.session] = active

    def preempt(self, sequence: TokenSequence) -> None:
        """Put the sequence's turn at the front of the queue if it runs."""
        active = self.running.pop(sequence.session, None)
        if active is not None:
            self.prepend(active)

    def remove(self, sequence: TokenSequence) -> None:
        """Forget the sequence's turn, if it waits or runs."""
        self.waiting.pop(sequence.session, None)
        self.running.pop(sequence.session, None)

    def weakest(self, asking: TokenSequence) -> TokenSequence | None:
        """The sequence with the weakest claim to its blocks: the last in the queue, then the youngest that runs.

        It may be the one that asks, unless nobody else is left.
        """
        waiting = (active.sequence for active in self.waiting.values())
        holders = [w for w in waiting if w.tier is Tier.DEVICE and w is not asking and not w.guaranteed]
        if holders:
            return holders[-1]
        sequences = (active.sequence for active in self.running.values())
        running = [r for r in sequences if r is asking or not r.guaranteed]
        return None if running in ([], [asking]) else running[-1]
