"""From the raw record to figures, each with its target. Pure."""

from collections.abc import Callable

import numpy as np

from benchmarks.breakpoints.plan import BUSY_SESSIONS, PREFILL_TOKENS
from benchmarks.breakpoints.runner import DecodeRound, Measured
from benchmarks.engine.pauses import PauseTimes
from benchmarks.figures import Figure, Target
from benchmarks.spread import middle_half
from loadgen.results.spread import Spread

DISPATCH_MS, RESTORE_MS = Target(0.1), Target(2.0)
BESIDE_PAUSED = Target(0.99, at_least=True)
UNMATCHED = Target(1.01)


def figures_of(measured: Measured) -> list[Figure]:
    """The whole table. Ratios are taken within a round, before the median over rounds."""
    return [
        *_pause_figures("decode", measured.decode_pauses),
        *_pause_figures(f"prefill of {PREFILL_TOKENS} tokens", measured.prefill_pauses),
        *_decode_figures(measured.rounds),
    ]


def _pause_figures(name: str, pauses: list[PauseTimes]) -> list[Figure]:
    def times(label: str, seconds: Callable[[PauseTimes], float], target: Target | None = None) -> list[Figure]:
        values = [seconds(entry) * 1e3 for entry in pauses]
        p99 = float(np.quantile(values, 0.99))
        return [
            Figure(f"{label}, {name}, p50", "ms", middle_half(values), target),
            Figure(f"{label}, {name}, p99", "ms", Spread.over([p99])),
        ]

    return [
        *times("Resume taken", lambda entry: entry.dispatch_s, DISPATCH_MS),
        *times("Checkpoint restored", lambda entry: entry.restore_s, RESTORE_MS),
        *times("Checkpoint saved", lambda entry: entry.save_s),
    ]


def _decode_figures(rounds: list[DecodeRound]) -> list[Figure]:
    figures = []
    for width in sorted({entry.width for entry in rounds}):
        rates = [entry.rates for entry in rounds if entry.width == width]
        name = "1 session" if width == 1 else f"{width} sessions"
        beside = middle_half([each["beside_paused"] / each["plain"] for each in rates])
        unmatched, steered = (
            middle_half([each["plain"] / each[kind] for each in rates]) for kind in ("unmatched", "steered")
        )
        target = BESIDE_PAUSED if width == BUSY_SESSIONS else None
        figures += [
            Figure(f"Decode, {name}", "tok/s", middle_half([each["plain"] for each in rates])),
            Figure(f"Throughput of {name} beside a paused one / alone", "×", beside, target),
            Figure(f"Time with breakpoints that do not match / without, {name}", "×", unmatched, UNMATCHED),
            Figure(f"Time steered (scale) / not, {name}", "×", steered),
        ]
    return figures
