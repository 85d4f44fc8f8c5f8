"""How much the headline figures differ from repeat to repeat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.stats.distribution import FEWEST_SAMPLES, Distribution
from loadgen.stats.summary import Summary


@dataclass(frozen=True, slots=True)
class Headline:
    """One figure: its value in each repeat, and the least and the greatest.

    None where a repeat has none, or too few samples for it.
    """

    values: tuple[float | None, ...]
    low: float | None
    high: float | None


def _percentile(field: str, name: str) -> Callable[[Summary], float | None]:
    def figure(summary: Summary) -> float | None:
        found: Distribution | None = getattr(summary, field)
        return float(getattr(found, name)) if found is not None and found.count >= FEWEST_SAMPLES[name] else None

    return figure


HEADLINES: dict[str, Callable[[Summary], float | None]] = {
    "ttft_first_p50_s": _percentile("ttft_first_s", "p50"),
    "ttft_first_p99_s": _percentile("ttft_first_s", "p99"),
    "ttft_resumed_p50_s": _percentile("ttft_resumed_s", "p50"),
    "ttft_resumed_p99_s": _percentile("ttft_resumed_s", "p99"),
    "wake_up_p99_s": _percentile("wake_up_s", "p99"),
    "tpot_p50_s": _percentile("tpot_s", "p50"),
    "turn_latency_p50_s": _percentile("turn_latency_s", "p50"),
    "turn_latency_p99_s": _percentile("turn_latency_s", "p99"),
    "tokens_per_s": lambda summary: summary.tokens_per_s,
    "turns_completed": lambda summary: float(summary.turns_completed),
    "goodput_share": lambda summary: None if summary.goodput is None else summary.goodput.share,
}


def spread(repeats: Sequence[Summary]) -> dict[str, Headline]:
    """The headline figures of every repeat, given the summary of each by itself."""
    return {name: _headline(tuple(figure(summary) for summary in repeats)) for name, figure in HEADLINES.items()}


def _headline(values: tuple[float | None, ...]) -> Headline:
    known = [value for value in values if value is not None]
    return Headline(values, min(known, default=None), max(known, default=None))
