"""Sessions and their turns in the simulation. Times are seconds of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simpy import Event


class Tier(Enum):
    """Where a session's KV is."""

    NONE = auto()
    DEVICE = auto()
    HOST = auto()
    DISK = auto()


@dataclass(slots=True, eq=False)
class Session:
    """One agent's conversation. `tokens` is its history, of which `kv` tokens have KV, in `tier` of the
    replica with the number `place`; its first one is its `home`.

    `claim` is the room in tokens that it takes there. `ready_s` is when its KV is on the device, if it is on the way.
    `stamp` changes whenever its KV or its turn does: what was planned for another stamp is void.
    """

    number: int
    tokens: int = 0
    kv: int = 0
    claim: int = 0
    stamp: int = 0
    tier: Tier = Tier.NONE
    home: int | None = None
    place: int | None = None
    ready_s: float = 0.0
    moving_until: float = 0.0
    returns_s: float = math.inf
    turn: Turn | None = None

    def lose_kv(self) -> None:
        """Its KV is gone; the history is not."""
        self.kv = self.claim = 0
        self.tier = Tier.NONE
        self.stamp += 1


@dataclass(slots=True, eq=False)
class Turn:
    """One turn: `new` tokens, then `completion` generated ones. `pending` tokens are to be computed before the first.

    `admitted`: it has room on the device, and runs. `expected`: its replica looks again when its KV is there.
    `recomputed` are tokens of the history that had to be recomputed. `luck`, from 0 to below 1, is its place among
    turns by how much of them can be drafted.
    """

    session: Session
    number: int
    new: int
    completion: int
    sent_s: float
    done: Event
    luck: float
    first_s: float = 0.0
    pending: int = 0
    passed_over: int = 0
    admitted: bool = False
    expected: bool = False
    recomputed: int = 0

    def start_anew(self) -> None:
        """Nothing of it has been done."""
        self.first_s = 0.0
        self.pending = self.passed_over = 0
        self.admitted = self.expected = False
