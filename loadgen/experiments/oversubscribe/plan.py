"""What the experiment does, decided before it runs."""

from dataclasses import dataclass

from loadgen.errors import LoadgenError, require_at_least
from loadgen.load.trace import AgentPlan, Trace, TurnPlan


@dataclass(frozen=True, slots=True)
class OversubscribePlan:
    """`sessions` sessions grow to `context` tokens each, in `turns` turns that generate `tokens` tokens; `concurrency`
    turns are under way at once. `checked` of the sessions are answered once more, each alone.

    Raises `LoadgenError` if a value is outside its range.
    """

    sessions: int = 32
    context: int = 1024
    turns: int = 4
    tokens: int = 16
    concurrency: int = 4
    checked: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, self, "sessions", "turns", "tokens", "concurrency")
        require_at_least(0, self, "checked", "seed")
        if self.context < self.turns * (self.tokens + 1):
            raise LoadgenError(
                f"context must be at least {self.turns * (self.tokens + 1)}: {self.turns} turns generate "
                f"{self.tokens} tokens each, after one of text at least"
            )

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """Tokens of text that each turn adds: as many as fill the context, the first ones one more if it is uneven."""
        share, rest = divmod(self.context - self.turns * self.tokens, self.turns)
        return tuple(share + (turn < rest) for turn in range(self.turns))

    @property
    def trace(self) -> Trace:
        """The same as a trace, for those who cut texts; times have no meaning in it."""
        turns = tuple(TurnPlan(count, self.tokens, None, None, tool=False) for count in self.new_tokens)
        return self.sessions * (AgentPlan(0.0, turns),)

    @property
    def checked_sessions(self) -> tuple[int, ...]:
        """Numbers of the sessions that are answered again: evenly spread over all."""
        count = min(self.checked, self.sessions)
        return tuple(place * self.sessions // count for place in range(count))


QUICK = OversubscribePlan(sessions=16, context=256, turns=3, tokens=8, checked=2)
"""Well under a minute for a small model on two cores."""
