"""Sessions that have said when they return, and when the way back of each must begin."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable

from app.domain.values import SessionId
from app.gpu.state.sequence import Sequence

PREFETCH_MARGIN_S = 0.1
"""How long before its return a session's KV should be on the device, at least."""
STEPS_IN_MARGIN = 2
"""A move is ordered when a step is over, and counts when another is."""
STEP_DECAY = 0.95
"""What the longest step still counts for after the next one: prompts come in bursts, and hold everything up."""


class PrefetchMargin:
    """How long before its return a session's KV should be on the device, as long as steps take lately."""

    def __init__(self) -> None:
        self._step_s = 0.0

    @property
    def seconds(self) -> float:
        """The margin now."""
        return PREFETCH_MARGIN_S + STEPS_IN_MARGIN * self._step_s

    def note_step(self, seconds: float) -> None:
        """Nothing could be ordered, or seen to have arrived, for so long."""
        self._step_s = max(seconds, STEP_DECAY * self._step_s)


class Returns:
    """Kept in the order of return, which is the order of the ways back: the link carries one session at a time.

    So each must set out early enough for itself and for all who return no later and are not back yet.
    """

    def __init__(self, way_back_s: Callable[[Sequence], float], margin: PrefetchMargin) -> None:
        self.next_start = math.inf
        """When the first of them must set out, as of the last `take_due`; meanwhile it may have become later."""
        self._way_back_s = way_back_s
        self._margin = margin
        self._order: list[tuple[float, SessionId]] = []
        self._expected: dict[SessionId, tuple[float, Sequence]] = {}

    def add(self, sequence: Sequence) -> None:
        """Expect the session at its return time, and at no other."""
        self.remove(sequence)
        self._expected[sequence.session] = sequence.return_time, sequence
        insort(self._order, (sequence.return_time, sequence.session))

    def remove(self, sequence: Sequence) -> None:
        """Expect the session no more."""
        if sequence.session in self._expected:
            return_time, _ = self._expected.pop(sequence.session)
            del self._order[bisect_left(self._order, (return_time, sequence.session))]

    def take_due(self, now: float, busy_s: float, longest_s: float) -> list[Sequence]:
        """Take out those who must set out now, the first to return first.

        The link is busy with others for the next `busy_s`. All ways back together, these included, take no longer than
        `longest_s`, so whoever returns that much later than another need not be looked at.
        """
        due, self.next_start = 0, math.inf
        for place, (return_time, session) in enumerate(self._order, start=1):
            if return_time - self._margin.seconds - longest_s >= self.next_start:
                break
            busy_s += self._way_back_s(self._expected[session][1])
            start = return_time - self._margin.seconds - busy_s
            if start <= now:
                due, self.next_start = place, math.inf  # those before it go first
            else:
                self.next_start = min(self.next_start, start)
        gone, self._order = self._order[:due], self._order[due:]
        return [self._expected.pop(session)[1] for _, session in gone]
