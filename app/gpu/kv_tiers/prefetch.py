"""Sessions that have said when they return, and when the prefetch of each must begin."""

import math
from bisect import bisect_left, insort
from collections.abc import Callable

from app.domain.values import SessionId
from app.gpu.state.sequence import TokenSequence

PREFETCH_MARGIN_S = 0.1
"""How long before its return a session's KV should be on the device, at least."""
STEPS_IN_MARGIN = 2
"""A move is ordered when a step is over, and counts when another is."""
STEP_DECAY = 0.95
"""How much of the longest step still counts after the next one: prompts come in bursts and delay everything."""


class PrefetchMargin:
    """How long before its return a session's KV should be on the device, as long as steps take lately."""

    def __init__(self) -> None:
        self._step_s = 0.0

    @property
    def seconds(self) -> float:
        """The margin now, in seconds."""
        return PREFETCH_MARGIN_S + STEPS_IN_MARGIN * self._step_s

    def note_step(self, seconds: float) -> None:
        """Note a step of so many seconds, during which no move could be ordered or accounted for."""
        self._step_s = max(seconds, STEP_DECAY * self._step_s)


class PrefetchOrder:
    """Sessions in the order of their return. They are prefetched in this order: the link carries one at a time.

    So each prefetch must begin early enough for itself and for all sessions that return no later.
    """

    def __init__(self, restore_s: Callable[[TokenSequence], float], margin: PrefetchMargin) -> None:
        self.next_start = math.inf
        """When the first prefetch must begin, as of the last `take_due`; it may have become later since."""
        self._restore_s = restore_s
        self._margin = margin
        self._order: list[tuple[float, SessionId]] = []
        self._expected: dict[SessionId, tuple[float, TokenSequence]] = {}

    def add(self, sequence: TokenSequence) -> None:
        """Expect the session at its return time; an earlier expectation is replaced."""
        self.remove(sequence)
        self._expected[sequence.session] = sequence.return_time, sequence
        insort(self._order, (sequence.return_time, sequence.session))

    def remove(self, sequence: TokenSequence) -> None:
        """Expect the session no more."""
        if sequence.session in self._expected:
            return_time, _ = self._expected.pop(sequence.session)
            del self._order[bisect_left(self._order, (return_time, sequence.session))]

    def take_due(self, now: float, busy_s: float, all_s: float) -> list[TokenSequence]:
        """Take out the sessions whose prefetch must begin now, in the order of their return.

        The link is busy with others for the next `busy_s` seconds. All restores together, these included, take at most
        `all_s` seconds, so the search ends at a session that returns that much later than another.
        """
        due, self.next_start = 0, math.inf
        for place, (return_time, session) in enumerate(self._order, start=1):
            if return_time - self._margin.seconds - all_s >= self.next_start:
                break
            busy_s += self._restore_s(self._expected[session][1])
            start = return_time - self._margin.seconds - busy_s
            if start <= now:
                due, self.next_start = place, math.inf  # those before it are prefetched first
            else:
                self.next_start = min(self.next_start, start)
        gone, self._order = self._order[:due], self._order[due:]
        return [self._expected.pop(session)[1] for _, session in gone]
