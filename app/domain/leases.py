"""The lease of a state folder: who may answer for the sessions in it, where two machines can reach the folder.

The folder has one lease, which names its holder. A holder's right ends a lease's length after it began to write its
last renewal, by its own clock. Whoever wants the folder watches the lease. It takes it when the lease has not changed
for longer than any clock of the holder can have needed. So no two clocks have to agree, and a holder that was frozen
finds that its time is over. `docs/design/moves.md` has the protocol.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

PATIENCE = 1.1
"""How many lengths of a lease without news are its end: of two clocks, neither may go a tenth faster than the other."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What the folder says."""

    epoch: int
    """One more each time that the folder gets another holder."""
    holder: str
    """A word that one process alone has: epochs of a folder that was put back may come twice."""
    machine: str
    """The holder's, since it was started; empty if the system does not tell."""
    length_s: float
    """0: free, as the last holder has released it."""
    renewals: int = 0
    news: str = ""
    """What a file beside the journal says: the holder changes it where it cannot write to the journal."""

    @property
    def is_free(self) -> bool:
        """Whether it is free."""
        return self.length_s == 0

    def next(self, holder: str, machine: str, length_s: float) -> Lease:
        """That of the next holder."""
        return Lease(self.epoch + 1, holder, machine, length_s)

    def renewed(self) -> Lease:
        """The same, with news."""
        return replace(self, renewals=self.renewals + 1)

    def released(self) -> Lease:
        """The same, free."""
        return replace(self, length_s=0.0)

    def is_of(self, other: Lease) -> bool:
        """Whether both have the same holder."""
        return (self.epoch, self.holder) == (other.epoch, other.holder)


NOBODYS = Lease(0, "", "", 0.0)
"""That of a folder that has never had one."""


class Watch:
    """Follows another's lease, by the watcher's own clock."""

    def __init__(self) -> None:
        self._seen: Lease | None = None
        self._since = 0.0

    def left_s(self, found: Lease, now: float) -> float:
        """How long it may still hold. `now` is a time after `found` was read: a watcher may be frozen in between."""
        if found != self._seen:
            self._seen, self._since = found, now
        return max(0.0, self._since + PATIENCE * found.length_s - now)


class Tenure:
    """The holder's own view. Any thread may ask; one renews."""

    def __init__(self, lease: Lease, began: float) -> None:
        """`began` is a time before the lease was written."""
        self.lease = lease
        self.is_lost = False
        """Whether the folder has another holder: for good."""
        self.ends_at = began + lease.length_s

    def renewed(self, lease: Lease, began: float) -> None:
        """The folder has `lease` now; `began` is a time before it was written."""
        self.lease, self.ends_at = lease, began + lease.length_s
        if self.is_lost:
            self.lose()

    def lose(self) -> None:
        """It holds no more, and never will."""
        self.is_lost = True
        self.ends_at = -math.inf
