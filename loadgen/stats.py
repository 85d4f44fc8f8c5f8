"""What runs of one target come to: percentiles, goodput, tokens, traffic, and how much repeats differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from loadgen.load.records import Failure, Moves, Run, Sample, ServerTotals, TurnRecord
from loadgen.load.workload import Measurement

FEWEST_SAMPLES = {"p50": 2, "p90": 10, "p95": 20, "p99": 100}
"""Of fewer, a percentile is no more than the greatest of them: a share q needs 1 / (1 - q) samples."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles of `count` samples, interpolated linearly between neighbours, in the unit of the samples."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Distribution | None:
        """The distribution of the samples; None if there are none."""
        values = np.fromiter(samples, float)
        if not values.size:
            return None
        p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
        return cls(values.size, float(values.mean()), p50, p90, p95, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class Goodput:
    """Turns that met every limit: how many per second, and their share of the turns that ran or failed."""

    turns_per_s: float
    share: float


def goodput(turns: Sequence[TurnRecord], failed: int, seconds: float, limits: Measurement) -> Goodput | None:
    """The goodput of the turns that completed within `seconds`, beside `failed` that did not complete.

    None without a limit, and where nothing was measured.
    """
    if (limits.slo_ttft_s, limits.slo_tpot_s) == (None, None) or not seconds or not (turns or failed):
        return None
    good = sum(_is_good(record, limits) for record in turns)
    return Goodput(good / seconds, good / (len(turns) + failed))


def _is_good(record: TurnRecord, limits: Measurement) -> bool:
    return _within(record.ttft_s, limits.slo_ttft_s) and _within(record.tpot_s, limits.slo_tpot_s)


def _within(value: float | None, limit: float | None) -> bool:
    """A turn of one token has no time per further token: it cannot miss that limit."""
    return value is None or limit is None or value <= limit


def total(values: Iterable[int | None]) -> int | None:
    """The sum of what servers report; None if one of the values is not reported."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def recomputed_tokens(turns: Sequence[TurnRecord]) -> dict[tuple[int, int], int | None]:
    """For each (agent, turn) of one run, the tokens of its prompt that had been computed in an earlier turn, and were
    recomputed.

    Djinn says so itself. For another server they are the tokens of the history that were not cached. Of a history all
    but the last token have been computed: that one was generated, and no turn has gone on from it yet. A cache that
    keeps whole blocks only pays for its last, partial block here, as it does in time. None where the server tells
    neither.
    """
    by_place = {(record.agent, record.turn): record for record in turns}
    return {place: _recomputed(record, by_place.get((place[0], place[1] - 1))) for place, record in by_place.items()}


def _recomputed(record: TurnRecord, before: TurnRecord | None) -> int | None:
    if record.cost.recomputed_tokens is not None:
        return record.cost.recomputed_tokens
    if record.turn == 0:
        return 0
    if record.cost.cached_tokens is None or before is None:
        return None
    computed = before.cost.prompt_tokens + before.cost.completion_tokens - 1
    return max(0, computed - record.cost.cached_tokens)


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


RESUME_PARTS = {
    "wake_up_s": ("queue", "restore"),
    "queue_s": ("queue",),
    "restore_s": ("restore",),
    "prefill_s": ("prefill",),
}
"""The parts of `TurnCost.resume_ms` that each figure is the sum of."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What runs of one target come to. Times in seconds; None where there is no figure.

    TTFT is from the sending of a turn to its first event with tokens, the opening of a session included; resumed
    turns are all but an agent's first. `queue_s`, `restore_s` and `prefill_s` are the parts of a resumed turn's time
    before its first token, as the server tells them; `wake_up_s` is the first two together. `inter_token_s` is the
    time from one event with tokens to the next of the same turn, `tpot_s` a turn's mean time per token after its first.
    A signal's time is its round trip. Lateness is how long after its due time a turn was sent: if it is not small, the
    load generator was the bottleneck. `tokens_per_s` counts the tokens of completed turns. Distributions, rates and
    goodput leave out what was sent during the warm-up; everything else is of the whole runs. When a turn was sent that
    failed is not known: it counts against goodput if it failed after the warm-up. `turn_errors` and `other_errors`,
    those of signals, of closing conversations and of what comes before the run, count kinds of errors.
    """

    ttft_first_s: Distribution | None
    ttft_resumed_s: Distribution | None
    wake_up_s: Distribution | None
    queue_s: Distribution | None
    restore_s: Distribution | None
    prefill_s: Distribution | None
    inter_token_s: Distribution | None
    tpot_s: Distribution | None
    turn_latency_s: Distribution | None
    signal_s: Distribution | None
    lateness_s: Distribution | None
    goodput: Goodput | None
    turns_per_s: float
    tokens_per_s: float
    duration_s: float
    interrupted: bool
    peak_agents: int
    turns_planned: int
    turns_completed: int
    turns_failed: int
    turns_not_run: int
    turn_errors: dict[str, int]
    other_errors: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    recomputed_tokens: int | None
    swaps: dict[str, Swaps] | None
    server_counts: dict[str, int] | None
    peak_device_bytes: int | None
    cpu_s: float | None
    peak_rss_bytes: int | None

    @property
    def cached_percent(self) -> float | None:
        """Of the prompt tokens; None where the server does not tell."""
        cached, read = self.cached_tokens, self.prompt_tokens
        return None if cached is None or not read else 100 * cached / read

    @property
    def succeeded(self) -> bool:
        """Whether every planned turn completed and nothing else failed."""
        return self.turns_completed == self.turns_planned and not self.other_errors


def summarize(runs: Sequence[Run], planned: int, measurement: Measurement) -> Summary:
    """The figures of runs, complete or not, each of which was to have `planned` turns."""
    warmup_s = measurement.warmup_s
    turns = [record for run in runs for record in run.turns]
    failures = [failure for run in runs for failure in run.failures]
    measured = [record for record in turns if record.sent_s >= warmup_s]
    resumed = [record for record in measured if record.turn > 0]
    failed = [failure for failure in failures if failure.turn is not None]
    seconds = sum(max(0.0, run.duration_s - warmup_s) for run in runs)
    return Summary(
        ttft_first_s=Distribution.of(record.ttft_s for record in measured if record.turn == 0),
        ttft_resumed_s=Distribution.of(record.ttft_s for record in resumed),
        **_resume_parts(resumed),
        inter_token_s=Distribution.of(gap for record in measured for gap in _gaps(record)),
        tpot_s=Distribution.of(tpot for record in measured if (tpot := record.tpot_s) is not None),
        turn_latency_s=Distribution.of(record.latency_s for record in measured),
        signal_s=Distribution.of(s.round_trip_s for run in runs for s in run.signals if s.sent_s >= warmup_s),
        lateness_s=Distribution.of(record.sent_s - record.due_s for record in measured),
        goodput=goodput(measured, sum(f.at_s >= warmup_s for f in failed), seconds, measurement),
        turns_per_s=len(measured) / seconds if seconds else 0.0,
        tokens_per_s=sum(record.cost.completion_tokens for record in measured) / seconds if seconds else 0.0,
        duration_s=sum(run.duration_s for run in runs),
        interrupted=any(run.interrupted for run in runs),
        peak_agents=max((peak_agents(run.turns) for run in runs), default=0),
        turns_planned=planned * len(runs),
        turns_completed=len(turns),
        turns_failed=len(failed),
        turns_not_run=planned * len(runs) - len(turns) - len(failed),
        turn_errors=_kinds(failed),
        other_errors=_kinds(failure for failure in failures if failure.turn is None),
        prompt_tokens=sum(record.cost.prompt_tokens for record in turns),
        completion_tokens=sum(record.cost.completion_tokens for record in turns),
        cached_tokens=total(record.cost.cached_tokens for record in turns),
        recomputed_tokens=total(tokens for run in runs for tokens in recomputed_tokens(run.turns).values()),
        swaps=swaps(runs),
        server_counts=server_counts(runs),
        peak_device_bytes=peak_device_bytes(runs),
        cpu_s=cpu_seconds(runs),
        peak_rss_bytes=peak_rss(runs),
    )


def _resume_parts(turns: Sequence[TurnRecord]) -> dict[str, Distribution | None]:
    """What went by before the first token, by the field of `Summary`, of the turns whose server tells it."""
    told = [record.cost.resume_ms for record in turns if record.cost.resume_ms is not None]
    return {
        field: Distribution.of(sum(parts[name] for name in names) / 1000 for parts in told)
        for field, names in RESUME_PARTS.items()
    }


def _kinds(failures: Iterable[Failure]) -> dict[str, int]:
    return dict(sorted(Counter(failure.kind for failure in failures).items()))


def _gaps(record: TurnRecord) -> Iterable[float]:
    return (later - earlier for earlier, later in pairwise(record.token_times_s))
