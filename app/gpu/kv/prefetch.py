"""When the prefetch of each session must begin for it to be back in time."""

import math

import numpy as np

from app.gpu.kv.return_order import ReturnOrder
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


class PrefetchOrder(ReturnOrder):
    """Sessions are prefetched in the order of their return: the link carries one at a time.

    So each prefetch must begin early enough for itself and for all sessions that return no later.
    """

    next_start = math.inf
    """When the first prefetch must begin, as of the last `take_due`; it may have become later since."""

    def take_due(
        self, now: float, margin_s: float, block_s: tuple[float, float], *, busy_s: float
    ) -> list[TokenSequence]:
        """Take out the sessions whose prefetch must begin now, in the order of their return.

        They are to be back `margin_s` early. A block takes `block_s` seconds: from disk, and to the device. The link is
        busy with others for the next `busy_s` seconds.
        """
        if not self:  # NumPy would take as long for none as for a few
            self.next_start = math.inf
            return []
        restored_s = busy_s + np.cumsum(np.asarray(block_s) @ self.blocks)
        starts = self.times - margin_s - restored_s
        [late] = np.nonzero(starts <= now)
        due = int(late[-1]) + 1 if len(late) else 0  # those before it are prefetched first
        self.next_start = float(starts[due:].min(initial=math.inf))
        return self.take(due)
