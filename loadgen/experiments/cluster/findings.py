"""What was seen of one cluster, as it was seen. Times in seconds since the run began."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from loadgen.results.failures import Failure


@dataclass(frozen=True, slots=True)
class Move:
    """A session that an operator has moved: `tokens_with_kv` of its `tokens` need not be recomputed."""

    at_s: float
    seconds: float
    bytes: int
    tokens: int
    tokens_with_kv: int


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to a replica: `kill` or `drain`. `ended_s` is when it took new work again, None: it did not."""

    kind: str
    replica: str
    began_s: float
    ended_s: float | None


@dataclass(frozen=True, slots=True)
class WrongTurn:
    """A turn, or with `turn` None a history, that is not what it must be. `what` says how."""

    agent: int
    turn: int | None
    what: str


@dataclass(slots=True)
class Retries:
    """What clients had to retry. `turns`, each an agent and its turn, had an error before they were done;
    `recovered` of them had been done, and only their answer was lost. `errors` counts those of all requests of agents,
    by their codes.
    """

    turns: list[tuple[int, int]] = field(default_factory=list)
    recovered: int = 0
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Routing:
    """How turns reached their owners, by `djinn_cluster_requests` of the replicas (docs/reference/cluster.md)."""

    owner: int
    followed: int
    moving_on: int
    away: int
    lost: int

    @property
    def affinity(self) -> float | None:
        """The share of turns that a replica got whose owner was the first that was asked; None of no turns."""
        first = self.owner + self.lost
        every = first + self.followed + self.moving_on
        return first / every if every else None


@dataclass(slots=True)
class Findings:
    """Everything seen beside the run itself. `compared` turns of `tokens` tokens were held beside a single server's.
    `owners` counts sessions by how many replicas say that they have them. `refused` counts moves that were, by code.
    `cold` counts turns of hashed sessions that came to a replica without all of the session's history.
    """

    moves: list[Move] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    retries: Retries = field(default_factory=Retries)
    routing: Routing | None = None
    cold: int = 0
    compared: int = 0
    tokens: int = 0
    wrong: list[WrongTurn] = field(default_factory=list)
    lost: list[WrongTurn] = field(default_factory=list)
    owners: dict[int, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False
