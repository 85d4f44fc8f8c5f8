"""From the raw record to figures, each with its target. Pure."""

from collections.abc import Callable

import numpy as np

from benchmarks.figures import Figure, Target
from benchmarks.kv.bandwidth import Copies, CopyRound
from benchmarks.kv.parks import ParkedTwice
from benchmarks.kv.resume import ResumeRound
from benchmarks.kv.runner import Measured
from benchmarks.kv.signals import SignalTimes
from benchmarks.spread import middle_half, ratio_of_medians
from loadgen.results.spread import Spread
from loadgen.targets.histogram import quantile

BANDWIDTH = Target(0.9, at_least=True)
READY, COLD = Target(1.05), Target(1.0)
SECOND_PARK = Target(0.1)
SIGNAL_MS = Target(0.1)


def figures_of(measured: Measured) -> list[Figure]:
    """The whole table."""
    return [
        *_copy_figures(measured.copies, measured.session_bytes),
        *_resume_figures(measured.resumes),
        _park_figure(measured.parks),
        *_signal_figures(measured.signals),
    ]


def _copy_figures(copies: Copies, copied: int) -> list[Figure]:
    def ratio(label: str, seconds: Callable[[CopyRound], float]) -> Figure:
        ratios = [entry.memcpy / seconds(entry) for entry in copies.rounds]
        return Figure(f"{label}, of the plain copy's rate", "×", middle_half(ratios), BANDWIDTH)

    plain = middle_half([copied / entry.memcpy / 1e9 for entry in copies.rounds])
    first = Spread.over([copied / seconds / 1e9 for seconds in copies.first_out_s])
    return [
        Figure(f"Plain copy of {copied / 2**20:.0f} MiB", "GB/s", plain),
        ratio("Move out, neighbouring blocks", lambda entry: entry.out_neighbouring),
        ratio("Move out, scattered blocks", lambda entry: entry.out_scattered),
        ratio("Move in, neighbouring blocks", lambda entry: entry.in_neighbouring),
        ratio("Move in, scattered blocks", lambda entry: entry.in_scattered),
        Figure("Move out to memory never written before", "GB/s", first),
    ]


def _resume_figures(rounds: list[ResumeRound]) -> list[Figure]:
    def times(label: str, seconds: Callable[[ResumeRound], float]) -> Figure:
        return Figure(label, "ms", middle_half([seconds(entry) * 1e3 for entry in rounds]))

    resident = [entry.resident.first_token_s for entry in rounds]
    again = [entry.resident_again.first_token_s for entry in rounds]
    ready = [entry.ready.first_token_s for entry in rounds]
    cold = [entry.cold.first_token_s for entry in rounds]
    restored = [entry.resident.first_token_s + entry.cold.restore_s for entry in rounds]
    return [
        times("First token, resident", lambda entry: entry.resident.first_token_s),
        times("First token, `ready` sent ahead", lambda entry: entry.ready.first_token_s),
        times("First token, cold from host", lambda entry: entry.cold.first_token_s),
        times("Restore in a cold turn", lambda entry: entry.cold.restore_s),
        Figure("Resident again / resident: the noise", "×", ratio_of_medians(again, resident)),
        Figure("`ready` sent ahead / resident", "×", ratio_of_medians(ready, resident), READY),
        Figure("Cold / (resident + restore)", "×", ratio_of_medians(cold, restored), COLD),
    ]


def _park_figure(parks: list[ParkedTwice]) -> Figure:
    ratios = [entry.second_bytes / entry.first_bytes for entry in parks]
    return Figure("Bytes of a second park / first", "×", Spread.over(ratios), SECOND_PARK)


def _signal_figures(signals: SignalTimes) -> list[Figure]:
    p50, p99 = np.quantile(signals.round_trips_s, [0.5, 0.99]) * 1e3
    figures = [_point("Signal, HTTP round trip, p50", p50), _point("Signal, HTTP round trip, p99", p99)]
    if signals.server is not None:
        p50, p99 = (quantile(signals.server, share) * 1e3 for share in (0.5, 0.99))
        figures += [_point("Signal, in the server, p50", p50), _point("Signal, in the server, p99", p99, SIGNAL_MS)]
    return figures


def _point(label: str, milliseconds: float, target: Target | None = None) -> Figure:
    return Figure(label, "ms", Spread.over([float(milliseconds)]), target)
