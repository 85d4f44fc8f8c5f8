"""From records to figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from loadgen.records import Failure, Run, TurnRecord
from loadgen.workload import Workload


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles of `count` samples, interpolated linearly between neighbours, in the unit of the samples."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Distribution | None:
        """The distribution of the samples; None if there are none."""
        if not samples:
            return None
        p50, p90, p99 = np.percentile(samples, (50, 90, 99)).tolist()
        return cls(len(samples), float(np.mean(samples)), p50, p90, p99, max(samples))


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run of one target comes to. Times in seconds.

    TTFT is from the sending of a turn to its first event with tokens, the opening of a session included; resumed
    turns are all but an agent's first. Inter-token latency is the time from one event with tokens to the next of the
    same turn. A signal's time is its round trip. Lateness is how long after its due time a turn was sent: if it is not
    small, the load generator was the bottleneck. `tokens_per_s` counts the tokens of completed turns over the whole
    run. `turn_errors` and `other_errors`, those of signals and of closing conversations, count kinds of errors.
    """

    ttft_first_s: Distribution | None
    ttft_resumed_s: Distribution | None
    turn_latency_s: Distribution | None
    inter_token_s: Distribution | None
    signal_s: Distribution | None
    lateness_s: Distribution | None
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

    @property
    def succeeded(self) -> bool:
        """Whether every planned turn completed and every conversation could be closed."""
        return self.turns_completed == self.turns_planned and not self.other_errors


def summarize(run: Run, workload: Workload) -> Summary:
    """The figures of a run, complete or not."""
    planned = workload.agents * workload.turns
    failed = sum(failure.turn is not None for failure in run.failures)
    completion_tokens = sum(record.cost.completion_tokens for record in run.turns)
    return Summary(
        ttft_first_s=Distribution.of([_ttft(record) for record in run.turns if record.turn == 0]),
        ttft_resumed_s=Distribution.of([_ttft(record) for record in run.turns if record.turn > 0]),
        turn_latency_s=Distribution.of([record.latency_s for record in run.turns]),
        inter_token_s=Distribution.of([gap for record in run.turns for gap in _gaps(record)]),
        signal_s=Distribution.of([signal.round_trip_s for signal in run.signals]),
        lateness_s=Distribution.of([record.sent_s - record.due_s for record in run.turns]),
        tokens_per_s=completion_tokens / run.duration_s if run.duration_s else 0.0,
        duration_s=run.duration_s,
        interrupted=run.interrupted,
        peak_agents=peak_agents(run.turns),
        turns_planned=planned,
        turns_completed=len(run.turns),
        turns_failed=failed,
        turns_not_run=planned - len(run.turns) - failed,
        turn_errors=_kinds(failure for failure in run.failures if failure.turn is not None),
        other_errors=_kinds(failure for failure in run.failures if failure.turn is None),
        prompt_tokens=sum(record.cost.prompt_tokens for record in run.turns),
        completion_tokens=completion_tokens,
        cached_tokens=_sum(record.cost.cached_tokens for record in run.turns),
        recomputed_tokens=_sum(record.cost.recomputed_tokens for record in run.turns),
    )


def peak_agents(turns: Iterable[TurnRecord]) -> int:
    """The most agents that were between the start of their first and the end of their last completed turn at once."""
    spans: dict[int, tuple[float, float]] = {}
    for record in turns:
        start, end = spans.get(record.agent, (record.sent_s, 0.0))
        spans[record.agent] = (min(start, record.sent_s), max(end, record.sent_s + record.latency_s))
    changes = sorted([(start, 1) for start, _ in spans.values()] + [(end, -1) for _, end in spans.values()])
    return max(np.cumsum([change for _, change in changes]).tolist(), default=0)


def _kinds(failures: Iterable[Failure]) -> dict[str, int]:
    return dict(sorted(Counter(failure.kind for failure in failures).items()))


def _ttft(record: TurnRecord) -> float:
    return record.token_times_s[0]


def _gaps(record: TurnRecord) -> Iterable[float]:
    return (later - earlier for earlier, later in pairwise(record.token_times_s))


def _sum(values: Iterable[int | None]) -> int | None:
    """The sum of what servers report; None if one of the values is not reported."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)
