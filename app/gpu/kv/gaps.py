"""How long a session's KV stays in a tier while its client waits: as long as earlier waits say that it pays.

Gaps at tools are short with a heavy tail. To leave at once copies KV for gaps that end at once; never to leave holds it
through those that do not end. What a stay costs is the time that the KV holds the tier, and a move costs the time that
it does. So it stays for as long as makes their sum least on average, which is the ski-rental problem with a known
distribution (Karlin et al., *Competitive randomized algorithms for nonuniform problems*, 1994). Pure planning.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from app.domain.values import EARLY_WAITS


@dataclass(frozen=True, slots=True)
class Gap:
    """A wait that began at `began`, of a kind of which earlier ones took `lengths` seconds, in ascending order."""

    began: float
    lengths: Sequence[float] = ()

    def _longer(self, now: float) -> Sequence[float]:
        """Those of the earlier ones that took longer than this one has by now."""
        return self.lengths[bisect_right(self.lengths, now - self.began) :]

    def leave_at(self, now: float, move_s: float) -> float:
        """When KV should leave a tier, if moves away and back take `move_s`. A wait that is longer than all earlier
        ones may last: then it should by `move_s` after them.
        """
        longer = self._longer(now)
        if not longer:
            return self.began + max(self.lengths, default=0.0) + move_s
        elapsed, count = now - self.began, len(longer)
        costs = [move_s]  # of leaving now, then of leaving once one more of them has ended
        for ended, total in enumerate(accumulate(longer), 1):
            waited = longer[ended - 1] - elapsed
            costs.append((total - ended * elapsed + (count - ended) * (waited + move_s)) / count)
        stays = min(range(count + 1), key=lambda ended: (costs[ended], ended))
        if stays == count:
            return self.began + longer[-1] + move_s
        return now if stays == 0 else self.began + longer[stays - 1]

    def returns_at(self, now: float) -> float | None:
        """By when few of the waits that have gone on for so long are over; None: none has."""
        return self._quantile(now, EARLY_WAITS)

    def late_at(self, now: float) -> float | None:
        """By when most of them are; None: none has gone on for so long."""
        return self._quantile(now, 1 - EARLY_WAITS)

    def _quantile(self, now: float, share: float) -> float | None:
        longer = self._longer(now)
        return self.began + longer[int(share * len(longer))] if longer else None
