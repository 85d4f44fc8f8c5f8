"""What a server's own totals and its processes come to over runs, and how many agents it had at once."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.load.records import Moves, Run, Sample, ServerTotals, TurnRecord


@dataclass(frozen=True, slots=True)
class Swaps:
    """KV moved one way. `bytes_per_s` is the speed of the copies themselves; None where none took time."""

    count: int
    bytes: int
    seconds: float
    bytes_per_s: float | None


def swaps(runs: Sequence[Run]) -> dict[str, Swaps] | None:
    """What moved, by direction; None if a run's server did not tell."""
    totals = _all_totals(runs)
    if totals is None or not any(run.moves for run in totals):
        return None
    return {way: _add(run.moves[way] for run in totals) for way in totals[0].moves}


def server_counts(runs: Sequence[Run]) -> dict[str, int] | None:
    """The events that the server counts, by name; None if a run's server did not tell."""
    totals = _all_totals(runs)
    if totals is None or not any(run.counts for run in totals):
        return None
    return dict(sum((Counter(run.counts) for run in totals), Counter(dict.fromkeys(totals[0].counts, 0))))


def cpu_seconds(runs: Sequence[Run]) -> float | None:
    """What the server's processes used from the first to the last sample of each run; None if it is not known."""
    used = [_span([sample.cpu_s for sample in run.samples if sample.cpu_s is not None]) for run in runs]
    return None if None in used else sum(seconds for seconds in used if seconds is not None)


def peak_rss(runs: Iterable[Run]) -> int | None:
    """The most memory of the server's processes in any sample; None if it is not known."""
    return max((rss for sample in _samples(runs) if (rss := sample.rss_bytes) is not None), default=None)


def peak_device_bytes(runs: Iterable[Run]) -> int | None:
    """The most KV on the device in any sample; None if the server does not tell."""
    return max((sample.bytes["device"] for sample in _samples(runs) if "device" in sample.bytes), default=None)


def _samples(runs: Iterable[Run]) -> Iterable[Sample]:
    return (sample for run in runs for sample in run.samples)


def _all_totals(runs: Sequence[Run]) -> list[ServerTotals] | None:
    known = [run.totals for run in runs if run.totals is not None]
    return known if known and len(known) == len(runs) else None


def _add(moves: Iterable[Moves]) -> Swaps:
    parts = list(moves)
    moved, seconds = sum(part.bytes for part in parts), sum(part.seconds for part in parts)
    return Swaps(sum(part.count for part in parts), moved, seconds, moved / seconds if seconds else None)


def _span(values: Sequence[float]) -> float | None:
    return values[-1] - values[0] if values else None


def peak_agents(turns: Iterable[TurnRecord]) -> int:
    """The most agents that were between the start of their first and the end of their last completed turn at once."""
    spans: dict[int, tuple[float, float]] = {}
    for record in turns:
        start, end = spans.get(record.agent, (record.sent_s, 0.0))
        spans[record.agent] = (min(start, record.sent_s), max(end, record.sent_s + record.latency_s))
    changes = sorted([(start, 1) for start, _ in spans.values()] + [(end, -1) for _, end in spans.values()])
    return max(np.cumsum([change for _, change in changes]).tolist(), default=0)
