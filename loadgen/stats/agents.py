"""Agents over time."""

from collections.abc import Iterable

import numpy as np

from loadgen.load.records import TurnRecord


def peak_agents(turns: Iterable[TurnRecord]) -> int:
    """The most agents that were between the start of their first and the end of their last completed turn at once."""
    spans: dict[int, tuple[float, float]] = {}
    for record in turns:
        start, end = spans.get(record.agent, (record.sent_s, 0.0))
        spans[record.agent] = (min(start, record.sent_s), max(end, record.sent_s + record.latency_s))
    changes = sorted([(start, 1) for start, _ in spans.values()] + [(end, -1) for _, end in spans.values()])
    return max(np.cumsum([change for _, change in changes]).tolist(), default=0)
