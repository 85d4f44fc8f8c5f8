"""What the experiment does, decided before it runs."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.errors import LoadgenError, require_at_least

FAULTS = (
    "kill of the engine",
    "kill of the server",
    "end of the server",
    "damaged KV",
    "full disk",
    "cancelled streams",
)
"""In every round of so many faults each comes once."""
SPREAD = 0.2
"""The time between two faults is the plan's, give or take this share."""
LONGEST_PROMPT = 40
"""Tokens of a turn's prompt."""
FEWEST_TURNS = 2
"""Of a session, before it is full."""
FIRST_TOKEN, LAST_TOKEN = 20, 200
"""Prompts are of these token ids: every vocabulary has them, and they are not special."""


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """For `minutes` minutes, `agents` agents take turns of `tokens` tokens. Their sessions end at `context` tokens.
    About every `every` seconds a fault comes.

    Raises `LoadgenError` if a value is outside its range.
    """

    minutes: float = 60.0
    agents: int = 8
    context: int = 512
    tokens: int = 12
    every: float = 25.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, self, "agents", "tokens")
        require_at_least(0, self, "seed")
        require_at_least(FEWEST_TURNS * self.longest_turn, self, "context")
        for name in ("minutes", "every"):
            if not 0 < getattr(self, name) < float("inf"):
                raise LoadgenError(f"{name} must be a number above 0")

    @property
    def seconds(self) -> float:
        """How long the agents run."""
        return 60 * self.minutes

    @property
    def longest_turn(self) -> int:
        """Tokens that a turn adds at most."""
        return LONGEST_PROMPT + self.tokens

    def faults(self) -> Iterator[tuple[float, str]]:
        """Without end: the seconds to wait, and the fault that comes then."""
        choose = random.Random(self.seed)
        while True:
            for name in choose.sample(FAULTS, len(FAULTS)):
                yield self.every * choose.uniform(1 - SPREAD, 1 + SPREAD), name
