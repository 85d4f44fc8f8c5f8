"""What is done to each cluster, decided before it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from loadgen.errors import LoadgenError, require_at_least

MOST_REPLICAS = 64


class Router(StrEnum):
    """Who chooses a turn's replica: the replicas, which know each session's owner, or a hash of the session's name,
    as in Ray Serve's consistent hash router.
    """

    OWNER = "owner"
    HASH = "hash"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The trace runs on a cluster of each size in `replicas`, with each of the `routers`. Meanwhile an operator moves
    `moves_per_second` sessions that rest. With `kill_every`, so many seconds after the last one a replica is killed, at
    most `kills` times, or with 0 as often as the trace lasts. `drain_at` is when one gets SIGTERM, None: never. With
    `standby`, another process waits to take the place of each replica.

    Raises `LoadgenError` if a value is outside its range.
    """

    replicas: tuple[int, ...] = (1, 2, 4)
    routers: tuple[Router, ...] = (Router.OWNER,)
    moves_per_second: float = 0.0
    kill_every: float | None = None
    kills: int = 0
    drain_at: float | None = None
    standby: bool = False
    turn_timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.replicas or not all(1 <= count <= MOST_REPLICAS for count in self.replicas):
            raise LoadgenError(f"replicas must be numbers from 1 to {MOST_REPLICAS}")
        if len(set(self.replicas)) < len(self.replicas):
            raise LoadgenError("replicas names a number twice")
        if not self.routers or len(set(self.routers)) < len(self.routers):
            raise LoadgenError("routers needs one or both of owner and hash, once each")
        require_at_least(0, self, "kills")
        if not 0 <= self.moves_per_second < math.inf:
            raise LoadgenError("moves_per_second must be at least 0 and finite")
        for name in ("kill_every", "drain_at", "turn_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise LoadgenError(f"{name} must be above 0 and finite, in seconds")
        if self.kills and self.kill_every is None:
            raise LoadgenError("kills has no effect without kill_every")

    def moves(self, replicas: int, router: Router) -> bool:
        """Whether sessions move in a cluster of that size. A hash would not find them again."""
        return self.moves_per_second > 0 and replicas > 1 and router is Router.OWNER
