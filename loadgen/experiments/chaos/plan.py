"""What the experiment does, decided before it runs."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.errors import LoadgenError, require_at_least
from loadgen.plans import option

SERVER_FAULTS = (
    "kill of the engine",
    "kill of the server",
    "end of the server",
    "damaged KV",
    "full disk",
    "cancelled streams",
)
"""In every round of so many faults each comes once."""
CLUSTER_FAULTS = ("kill of a replica", "end of a replica", "cancelled streams")
"""The same, where there are replicas."""
MOST_REPLICAS = 64
SPREAD = 0.2
"""The time between two faults is the plan's, give or take this share."""
LONGEST_PROMPT = 40
"""Tokens of a turn's prompt."""
FEWEST_TURNS = 2
"""Of a session, before it is full."""
FIRST_TOKEN, LAST_TOKEN = 20, 200
"""Prompts are of these token ids: every vocabulary has them, and they are not special."""


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """For `minutes` minutes, `agents` agents take turns of `tokens` tokens. Their sessions end at `context` tokens.
    About every `every` seconds a fault comes. With `replicas` the server is a cluster of so many, and an operator moves
    `moves_per_second` sessions.

    Raises `LoadgenError` if a value is outside its range.
    """

    minutes: float = option(60.0, "how long agents run")
    agents: int = option(8, "agents at once")
    context: int = option(512, "tokens of a session, before another is opened")
    tokens: int = option(12, "tokens generated in each turn, greedily")
    every: float = option(25.0, "seconds between two faults, about")
    seed: int = option(0, "of prompts, actions and faults")
    replicas: int = option(0, "of a cluster in place of the server")
    moves_per_second: float = option(0.0, "sessions that an operator moves between replicas")
    standby: bool = option(False, "start the cluster with --standby: killed replicas return sooner")

    def __post_init__(self) -> None:
        require_at_least(1, self, "agents", "tokens")
        require_at_least(0, self, "seed", "replicas")
        require_at_least(FEWEST_TURNS * self.longest_turn, self, "context")
        for name in ("minutes", "every"):
            if not 0 < getattr(self, name) < float("inf"):
                raise LoadgenError(f"{name} must be a number above 0")
        if self.replicas > MOST_REPLICAS:
            raise LoadgenError(f"replicas must be at most {MOST_REPLICAS}, not {self.replicas}")
        if not 0 <= self.moves_per_second < float("inf"):
            raise LoadgenError("moves_per_second must be at least 0 and finite")
        if self.moves_per_second and self.replicas < 2:
            raise LoadgenError("moves_per_second needs replicas: at least 2")
        if self.standby and not self.replicas:
            raise LoadgenError("standby needs replicas")

    @property
    def seconds(self) -> float:
        """How long the agents run."""
        return 60 * self.minutes

    @property
    def longest_turn(self) -> int:
        """Tokens that a turn adds at most."""
        return LONGEST_PROMPT + self.tokens

    @property
    def faults(self) -> tuple[str, ...]:
        """The kinds that come."""
        return CLUSTER_FAULTS if self.replicas else SERVER_FAULTS

    def timetable(self) -> Iterator[tuple[float, str]]:
        """Without end: the seconds to wait, and the fault that comes then."""
        choose = random.Random(self.seed)
        while True:
            for name in choose.sample(self.faults, len(self.faults)):
                yield self.every * choose.uniform(1 - SPREAD, 1 + SPREAD), name
