"""What is simulated, decided before it runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from loadgen.errors import LoadgenError, require_at_least


class Policy(StrEnum):
    """How the front door chooses a replica for a turn."""

    OWNER = "owner"
    """As Djinn does: a session belongs to a replica, at first the one with the most free KV."""
    HASH = "hash"
    """Consistent hashing of the session's id over the replicas that are up."""
    SHORTEST = "shortest"
    """The replica with the fewest turns, wherever the KV is."""


class Happening(StrEnum):
    """What can happen to a cluster while it runs."""

    REPLICA = "replica"
    """One replica is killed."""
    ZONE = "zone"
    """All replicas of one zone are killed."""
    ROLLING = "rolling"
    """All replicas are started anew in turn. Under `owner` their sessions move away before."""
    RESTARTS = "restarts"
    """The same without moves: sessions wait for their replica."""
    ADD = "add"
    """More replicas come."""
    BALANCE = "balance"
    """Sessions move from replicas that have more than the mean to those with fewer, if the policy is `owner`."""


COUNTS = {Happening.ZONE: 3, Happening.ADD: None, Happening.ROLLING: 1, Happening.RESTARTS: 1}
"""Those that take a number, and its default: of zones, of replicas, of replicas at once."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens `at_s` seconds after the start. `count` as in `COUNTS`, 1 for the others."""

    what: Happening
    at_s: float
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Event:
        """Read `WHAT@SECOND` or `WHAT:COUNT@SECOND`, such as `zone@60` and `add:10@60`. Raises `LoadgenError`."""
        found = re.fullmatch(r"([a-z]+)(?::([1-9][0-9]*))?@([0-9]+(?:\.[0-9]+)?)", text)
        if found is None or found[1] not in set(Happening):
            names = ", ".join(Happening)
            raise LoadgenError(f"an event is WHAT@SECOND or WHAT:COUNT@SECOND, with one of {names}; not {text!r}")
        what = Happening(found[1])
        if found[2] is not None and what not in COUNTS:
            raise LoadgenError(f"{what} takes no number: {what}@{found[3]}")
        count = COUNTS.get(what, 1) if found[2] is None else int(found[2])
        if count is None:
            raise LoadgenError(f"{what} needs a number: {what}:COUNT@{found[3]}")
        return cls(what, float(found[3]), count)

    def __str__(self) -> str:
        counted = f":{self.count}" if self.what in COUNTS else ""
        return f"{self.what}{counted}@{self.at_s:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The cluster. Room of each replica is in tokens of KV: on the device, on the host, on disk.

    A step computes `step_tokens`, of which prompts have `shared_tokens` while there are other turns; at most `rows`
    turns run at once. KV moves between replicas at `link_bytes_per_s`, to each and from each. A replica that was killed
    or started anew is back after `down_s`. Who is refused asks again after `retry_s`. `front_s` is what the front door
    adds to a turn's first token. `draw` decides which measured step each simulated one is as long as.

    Raises `LoadgenError` if a value is outside its range.
    """

    replicas: int = 1
    device_tokens: int = 20 * 1024
    host_tokens: int = 200 * 1024
    disk_tokens: int = 2000 * 1024
    step_tokens: int = 512
    shared_tokens: int = 128
    rows: int = 256
    block_tokens: int = 16
    link_bytes_per_s: float = 1.25e9
    down_s: float = 30.0
    retry_s: float = 1.0
    front_s: float = 0.001
    events: tuple[Event, ...] = ()
    draw: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, self, "replicas", "device_tokens", "step_tokens", "shared_tokens", "rows", "block_tokens")
        require_at_least(0, self, "host_tokens", "disk_tokens", "down_s", "front_s")
        for name in ("link_bytes_per_s", "retry_s"):
            if not getattr(self, name) > 0:
                raise LoadgenError(f"{name} must be above 0")
