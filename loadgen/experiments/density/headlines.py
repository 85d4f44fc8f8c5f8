"""The figures that matter most, target beside target."""

from collections.abc import Callable, Sequence

from loadgen.experiments.density.report import Named, names
from loadgen.results.tables import TextTable
from loadgen.results.text import milliseconds
from loadgen.stats import HEADLINES, Distribution, Headline, Summary
from loadgen.stats.distribution import percentile

LABELS: dict[str, tuple[str, Callable[[float], str]]] = {
    "ttft_resumed_p50_s": ("TTFT, resumed, p50, ms", milliseconds),
    "ttft_resumed_p99_s": ("TTFT, resumed, p99, ms", milliseconds),
    "ttft_first_p50_s": ("TTFT, first, p50, ms", milliseconds),
    "ttft_first_p99_s": ("TTFT, first, p99, ms", milliseconds),
    "wake_up_p99_s": ("wake-up, p99, ms", milliseconds),
    "tpot_p50_s": ("per output token, p50, ms", milliseconds),
    "turn_latency_p50_s": ("turn latency, p50, ms", milliseconds),
    "turn_latency_p99_s": ("turn latency, p99, ms", milliseconds),
    "tokens_per_s": ("tokens/s", "{:,.1f}".format),
    "goodput_share": ("goodput, of turns", "{:.0%}".format),
}
"""Each headline figure, in the order of the table; how many turns completed has a row of its own."""

SHARES = ("goodput_share",)
"""Figures of which no multiples are told."""

FACTORS = "In brackets: times the first target's."


def headline_table(targets: Sequence[Named]) -> TextTable:
    """A row for each figure and a column for each target."""
    summaries = [target.report.summary for target in targets]
    rows = [("turns completed", *(f"{s.turns_completed:,} of {s.turns_planned:,}" for s in summaries))]
    rows += [(LABELS[name][0], *_cells(name, summaries)) for name in LABELS]
    told = [row for row in rows if any(row[1:])]
    return TextTable("Side by side", ("", *names(targets)), told, FACTORS if len(targets) > 1 else "")


def _cells(name: str, summaries: Sequence[Summary]) -> list[str]:
    """The figure of each target, and what it is of the first's."""
    values = [HEADLINES[name](summary) for summary in summaries]
    write, base = LABELS[name][1], None if name in SHARES else values[0]
    cells = [
        _too_few(name, one) if value is None else write(value) for value, one in zip(values, summaries, strict=True)
    ]
    return cells[:1] + [
        f"{cell} ({value / base:,.3g}×)" if value is not None and base else cell
        for cell, value in zip(cells[1:], values[1:], strict=True)
    ]


def _too_few(name: str, summary: Summary) -> str:
    """What stands for a figure that a target has not: of too few samples that, of none nothing."""
    field, _, quantile = name.removesuffix("_s").rpartition("_")
    found: Distribution | None = getattr(summary, f"{field}_s", None)
    return "" if found is None else percentile(quantile, "", found.count)


def spread_table(targets: Sequence[Named]) -> TextTable | None:
    """The headline figures of each repeat; None if there was only one."""
    if all(len(target.report.runs) < 2 for target in targets):
        return None
    rows: list[tuple[str, ...]] = []
    for name, (label, write) in LABELS.items():
        shown = [target for target in targets if _is_told(target.report.spread[name])]
        for place, target in enumerate(shown):
            headline = target.report.spread[name]
            rows.append(("" if place else label, target.name, *_spread_cells(headline, write)))
    repeats = max(len(target.report.runs) for target in targets)
    header = ("", "target", *(f"repeat {repeat + 1}" for repeat in range(repeats)), "least", "greatest")
    return TextTable("Spread over repeats", header, rows, text_columns=2)


def _is_told(headline: Headline) -> bool:
    return headline.low is not None


def _spread_cells(headline: Headline, write: Callable[[float], str]) -> tuple[str, ...]:
    values = (*headline.values, headline.low, headline.high)
    return tuple("too few samples" if value is None else write(value) for value in values)
