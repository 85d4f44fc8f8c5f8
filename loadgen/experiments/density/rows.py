"""What runs of a trace come to, as flat rows, figures and charts. Pure."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from loadgen.experiments.density.live import by_tier
from loadgen.load.records import Run, taken
from loadgen.report.report import Chart
from loadgen.report.tables import DIRECTIONS, MIB, Cell, Figure, Row, Spread, Table, counts, duration, milliseconds
from loadgen.stats import FEWEST_SAMPLES, Distribution, Summary, recomputed_tokens

PARTS = ("queue", "restore", "prefill")
TURNS, SAMPLES, TIERS, WAITS, SIGNALS = "turns", "samples", "sessions by tier", "waits", "signals"
"""Tables of raw rows."""
NOT_TOLD = "not told"
"""Where a server does not say."""
Reading = Callable[[Summary], float | None]


def _percentile(field: str, name: str) -> Reading:
    def figure(summary: Summary) -> float | None:
        found: Distribution | None = getattr(summary, field)
        return float(getattr(found, name)) if found is not None and found.count >= FEWEST_SAMPLES[name] else None

    return figure


HEADLINES: dict[str, tuple[str, float, Reading]] = {
    "TTFT, resumed, p50": ("ms", 1e3, _percentile("ttft_resumed_s", "p50")),
    "TTFT, resumed, p99": ("ms", 1e3, _percentile("ttft_resumed_s", "p99")),
    "TTFT, first, p50": ("ms", 1e3, _percentile("ttft_first_s", "p50")),
    "TTFT, first, p99": ("ms", 1e3, _percentile("ttft_first_s", "p99")),
    "wake-up, p99": ("ms", 1e3, _percentile("wake_up_s", "p99")),
    "per output token, p50": ("ms", 1e3, _percentile("tpot_s", "p50")),
    "turn latency, p50": ("ms", 1e3, _percentile("turn_latency_s", "p50")),
    "turn latency, p99": ("ms", 1e3, _percentile("turn_latency_s", "p99")),
    "tokens/s": ("", 1.0, lambda summary: summary.tokens_per_s),
    "goodput, of turns": ("%", 100.0, lambda summary: None if summary.goodput is None else summary.goodput.share),
}
"""Each headline figure: its unit, what it is multiplied with, and where it is; None where there are too few samples."""
LATENCIES = {
    "TTFT, first turn": "ttft_first_s",
    "TTFT, resumed turns": "ttft_resumed_s",
    "wake-up": "wake_up_s",
    "queue": "queue_s",
    "restore": "restore_s",
    "prefill": "prefill_s",
    "time per output token": "tpot_s",
    "inter-token latency": "inter_token_s",
    "turn latency": "turn_latency_s",
    "signal round trip": "signal_s",
    "lateness of sending": "lateness_s",
}
SECONDS = "seconds since the start"


def headlines(target: str, pooled: Summary, repeats: Sequence[Summary]) -> Iterator[Figure]:
    """The figures that matter most, of all repeats together; bounds are the least and greatest of the repeats."""
    for label, (unit, factor, reading) in HEADLINES.items():
        value, known = reading(pooled), [each for one in repeats if (each := reading(one)) is not None]
        found = None
        if value is not None:
            found = Spread(value, min(known, default=value), max(known, default=value), len(repeats)).scaled(factor)
        yield Figure(label, unit, found, by={"target": target})


def latency_table(summaries: Mapping[str, Summary]) -> Table:
    """Percentiles of every kind of waiting, by target."""
    rows = [
        {"": label, "target": target, **percentiles(found)}
        for label, name in LATENCIES.items()
        for target, summary in summaries.items()
        if (found := getattr(summary, name)) is not None
    ]
    note = (
        "Wake-up, which is queue and restore together, and prefill are of resumed turns, where the server tells them. "
        "A percentile of too few samples is left out."
    )
    return Table("Milliseconds", rows, note)


def percentiles(found: Distribution | None) -> dict[str, Cell]:
    """In milliseconds, where there are enough samples for them."""
    if found is None:
        return {}
    enough = {name: milliseconds(getattr(found, name)) for name, n in FEWEST_SAMPLES.items() if found.count >= n}
    return {"samples": found.count, **dict.fromkeys(FEWEST_SAMPLES), **enough, "max": milliseconds(found.max)}


def total_table(summaries: Mapping[str, Summary]) -> Table:
    """Sums over whole runs, a column for each target."""
    columns = {target: totals(summary) for target, summary in summaries.items()}
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    return Table("Totals", [{"": label, **{t: c.get(label) for t, c in columns.items()}} for label in labels])


def totals(summary: Summary) -> dict[str, Cell]:
    """By name."""
    good, cached = summary.goodput, summary.cached_tokens
    told: dict[str, Cell] = {
        "turns completed": f"{summary.turns_completed:,} of {summary.turns_planned:,}",
        "turns failed": f"{summary.turns_failed:,}",
        "turns not run": f"{summary.turns_not_run:,}{' (interrupted)' if summary.interrupted else ''}",
        "errors of turns": counts(summary.turn_errors),
        "errors of signals and closing": counts(summary.other_errors),
        "duration": duration(summary.duration_s),
        "turns/s": f"{summary.turns_per_s:,.2f}",
        "tokens/s": f"{summary.tokens_per_s:,.1f}",
        "goodput, turns/s": "" if good is None else f"{good.turns_per_s:,.2f} ({good.share:.0%} of turns)",
        "agents at once": f"{summary.peak_agents:,}",
        "prompt tokens cached": "" if cached is None else f"{cached / max(1, summary.prompt_tokens):.0%}",
        "tokens recomputed": "" if summary.recomputed_tokens is None else f"{summary.recomputed_tokens:,}",
        "most KV on the device, MiB": "" if (kv := summary.peak_device_bytes) is None else f"{kv / MIB:,.1f}",
        "server's events": "" if summary.server_counts is None else counts(summary.server_counts),
        "server's CPU seconds": "" if summary.cpu_s is None else f"{summary.cpu_s:,.1f}",
        "server's peak memory, MiB": "" if (rss := summary.peak_rss_bytes) is None else f"{rss / MIB:,.1f}",
    }
    return {name: value or NOT_TOLD for name, value in told.items() if value or not name.startswith("goodput")}


def moved_table(summaries: Mapping[str, Summary]) -> Table:
    """KV that moved, by direction; what did not happen at all is left out."""
    rows = [
        {
            "target": target,
            "direction": DIRECTIONS.get(way, way),
            "times": swap.count,
            "MiB": swap.bytes / MIB,
            "seconds": swap.seconds,
            "GB/s": None if swap.bytes_per_s is None else swap.bytes_per_s / 1e9,
        }
        for target, summary in summaries.items()
        for way, swap in (summary.swaps or {}).items()
        if swap.count
    ]
    return Table("KV moved", rows)


def failure_table(runs: Mapping[str, Sequence[Run]]) -> Table:
    """What went wrong, by kind, with the first message of each."""
    rows: list[Row] = []
    for target, every in runs.items():
        failures = [failure for run in every for failure in run.failures]
        first = {failure.kind: failure.message for failure in reversed(failures)}
        for kind, number in Counter(failure.kind for failure in failures).most_common():
            rows.append({"target": target, "error": kind, "first message": first[kind], "times": number})
    return Table("What failed", rows)


def raw_tables(runs: Mapping[str, Sequence[Run]], warmup_s: float = 0.0) -> Iterator[Table]:
    """Every turn, signal and sample, and what charts draw of them; those over time are of each target's first run."""
    every = [(target, repeat, run) for target, found in runs.items() for repeat, run in enumerate(found)]
    yield Table(
        TURNS, [row for target, repeat, run in every for row in turn_rows(target, repeat, run, warmup_s)], shown=False
    )
    yield Table(
        SIGNALS,
        [
            {"target": target, "repeat": repeat, **taken(one, "agent", "phase", "sent_s", "round_trip_s")}
            for target, repeat, run in every
            for one in run.signals
        ],
        shown=False,
    )
    samples = [(target, repeat, one) for target, repeat, run in every for one in run.samples]
    yield Table(
        SAMPLES,
        [
            {
                "target": target,
                "repeat": repeat,
                **taken(one, "at_s", "running", "waiting", "kv_used", "cpu_s"),
                **{f"{tier}_MiB": held / MIB for tier, held in one.bytes.items()},
                "rss_MiB": None if one.rss_bytes is None else one.rss_bytes / MIB,
            }
            for target, repeat, one in samples
        ],
        shown=False,
    )
    yield Table(
        TIERS,
        [
            {"target": target, "at_s": one.at_s, "tier": tier, "sessions": count}
            for target, repeat, one in samples
            if repeat == 0 and one.sessions
            for tier, count in by_tier(one.sessions).items()
        ],
        shown=False,
    )


def turn_rows(target: str, repeat: int, run: Run, warmup_s: float) -> Iterator[Row]:
    """A row for each turn that completed or failed."""
    recomputed = recomputed_tokens(run.turns)
    for turn in run.turns:
        cost, parts = turn.cost, turn.cost.resume_ms or {}
        yield {
            "target": target,
            "repeat": repeat,
            **taken(turn, "agent", "turn", "tool", "due_s", "sent_s", "ttft_s", "tpot_s", "latency_s", "token_times_s"),
            **{f"{part}_ms": parts.get(part) for part in PARTS},
            **taken(cost, "prompt_tokens", "completion_tokens", "cached_tokens"),
            "recomputed_tokens": recomputed[turn.agent, turn.turn],
            "resumed": turn.turn > 0 and turn.sent_s >= warmup_s,
        }
    for failure in run.failures:
        if failure.turn is not None:
            place: Row = {"target": target, "repeat": repeat, "agent": failure.agent, "turn": failure.turn}
            yield {**place, "failed_s": failure.at_s, "error": failure.kind, "message": failure.message}


def wait_table(summaries: Mapping[str, Summary]) -> Table:
    """The mean time to first token of resumed turns in its parts; of the targets that tell them."""
    rows: list[Row] = []
    for target, summary in summaries.items():
        told = [getattr(summary, f"{part}_s") for part in PARTS]
        if summary.ttft_resumed_s is not None and None not in told:
            means = [found.mean for found in told]
            rest = max(0.0, summary.ttft_resumed_s.mean - sum(means))
            rows += [
                {"target": target, "part": part, "ms": 1000 * mean}
                for part, mean in zip((*PARTS, "the rest"), (*means, rest), strict=True)
            ]
    return Table(WAITS, rows, shown=False)


def charts(targets: Sequence[str]) -> Iterator[Chart]:
    """The most important first."""
    title, resumed = "Time to first token, resumed turns", {"resumed": True}
    caption = "Share of the resumed turns of all repeats whose first token had come by then. Further left is faster."
    yield Chart(title, caption, "cdf", TURNS, "ttft_s", "", "target", resumed, x_label="seconds", log_x=True)
    title = "Where a resumed turn waits for its first token"
    caption = "Mean of all resumed turns, in the parts that the server tells; targets that tell none are not shown."
    yield Chart(title, caption, "stack", WAITS, "target", "ms", "part", y_label="milliseconds")
    caption = "Sessions by where their KV is, while the server carries the load, in the first repeat."
    for target in targets:
        title, mine = f"Sessions per tier: {target}", {"target": target}
        yield Chart(title, caption, "areas", TIERS, "at_s", "sessions", "tier", mine, SECONDS, "sessions")
