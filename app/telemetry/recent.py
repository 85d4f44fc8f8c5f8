"""How much the counters of a server have risen over the last minutes: what alerts ask Prometheus for, asked here."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from app.domain.memory_map import MemoryMap

Totals = Mapping[tuple[str, str], float]
"""Counters since the start, by their name in `/metrics` and their label's value, which is empty without a label."""
EVERY_S = 5.0
KEPT_S = 900.0
"""The longest that an alert looks back."""


class RecentCounts:
    """Used on the event loop only. `read` tells the totals; of the engine only those in a memory map."""

    def __init__(self, read: Callable[[MemoryMap | None], Totals]) -> None:
        self._read = read
        self._last: dict[tuple[str, str], float] = {}
        self._sums = Counter[tuple[str, str]]()
        self._kept = deque[tuple[float, Counter[tuple[str, str]]]](maxlen=int(KEPT_S / EVERY_S) + 1)
        self.note(None)

    def note(self, memory: MemoryMap | None) -> None:
        """Look at the totals now, unless that was just done. One that is smaller than before has begun anew: another
        engine has taken the place of the one before.
        """
        now = time.monotonic()
        if self._kept and now - self._kept[-1][0] < EVERY_S:
            return
        for key, total in self._read(memory).items():
            before = self._last.get(key, 0.0)
            self._sums[key] += total - before if total >= before else total  # type: ignore[assignment]
            self._last[key] = total
        self._kept.append((now, self._sums.copy()))

    def by_label(self, name: str, seconds: float) -> Counter[str]:
        """How much a counter has risen in so many seconds, by its labels: since the last look before them."""
        since = time.monotonic() - seconds
        before = next((sums for at, sums in reversed(self._kept) if at <= since), self._kept[0][1])
        rises = {label: total - before[of, label] for (of, label), total in self._sums.items() if of == name}
        return Counter({label: rise for label, rise in rises.items() if rise > 0})

    def intervals(self, names: Sequence[str], seconds: float) -> Iterator[list[float]]:
        """How much each counter has risen, all labels together, from each look of so many seconds to the next."""
        since = time.monotonic() - seconds
        for (_, before), (at, after) in pairwise(self._kept):
            if at >= since:
                rises = after - before
                yield [sum(rise for (of, _), rise in rises.items() if of == name) for name in names]

    def rise(self, name: str, seconds: float) -> int:
        """The same of all labels together."""
        return int(self.by_label(name, seconds).total())
