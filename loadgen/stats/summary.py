"""What runs of one target come to."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadgen.load.measurement import Measurement
from loadgen.load.records import Failure, Run, TurnRecord
from loadgen.stats.distribution import Distribution
from loadgen.stats.goodput import Goodput, goodput
from loadgen.stats.tokens import recomputed_tokens, total
from loadgen.stats.traffic import Swaps, cpu_seconds, peak_agents, peak_device_bytes, peak_rss, server_counts, swaps

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
