"""Whether an engine gets on, as its process lets the server see it.

There are two signs. A process that says nothing is suspended, or starved: it beats each second, whatever its engine
does. An engine that beats may still be stuck, for example in a kernel that never ends: then its count of messages,
layers and steps stands still. One layer of a long prompt takes seconds on a slow processor, so that takes longer.
"""

from __future__ import annotations

from app.messages import GoesOn, Stalled

SILENT_S = 3.0
"""Without a beat for so long: new work is refused. Most processes that are late go on before their turns must end."""
UNHEARD_S = 7.0
"""Without a beat for so long: turns end too. Their clients can repeat them where an engine gets on."""


class Stalls:
    """Follows one process. Times are sums of what was waited for, not by a clock: they stand still while both processes
    are suspended.
    """

    def __init__(self, stuck_s: float) -> None:
        """`stuck_s`: how long one layer or step may take."""
        self._stuck_s = stuck_s
        self.silent_s = 0.0
        """How long the process has said nothing."""
        self.busy_s = 0.0
        """How long its engine has been busy with one thing, by the last beat."""
        self._told: Stalled | None = None

    def wait(self, seconds: float) -> None:
        """The process has said nothing for so many seconds more."""
        self.silent_s += seconds

    def hear(self, busy_s: float | None = None) -> None:
        """The process has said something; `busy_s` is what a beat tells."""
        self.silent_s = 0.0
        if busy_s is not None:
            self.busy_s = busy_s

    def news(self) -> Stalled | GoesOn | None:
        """What has changed since this was last asked."""
        now, before = self._stall(), self._told
        if now is None:
            self._told = None
            return None if before is None else GoesOn()
        if before is not None and before.ends_turns >= now.ends_turns:
            return None
        self._told = now
        return now

    def _stall(self) -> Stalled | None:
        if self.silent_s >= SILENT_S:
            ends_turns = self.silent_s >= UNHEARD_S
            return Stalled(f"its process has said nothing for {self.silent_s:.0f} s", ends_turns)
        if self.busy_s >= self._stuck_s:
            return Stalled(f"it has been busy with one thing for {self.busy_s:.0f} s", ends_turns=True)
        return None
