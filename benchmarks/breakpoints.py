"""`python -m benchmarks.breakpoints`: what pausing, resuming and steering cost, and what they cost others."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch

from benchmarks.command import Benchmark
from benchmarks.cpu_meter import CpuMeter
from benchmarks.engine.away import random_tokens
from benchmarks.engine.decoding import WARM_UP_TOKENS, DecodeBench
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import build, load_layers
from benchmarks.engine.pauses import PauseBench, PauseTimes
from benchmarks.engine.watched import WatchedStack
from benchmarks.spread import middle_half
from loadgen.report.figures import Figure, Spread, Target

DTYPE = "float32"
SETTINGS = {"dtype": DTYPE, "kv_device": "256MiB"}
PROMPT_TOKENS = 64
PREFILL_TOKENS = 512
BUSY_SESSIONS = 16
WIDTHS = (1, BUSY_SESSIONS)
"""How many sessions decode at once."""
KINDS = ("plain", "beside_paused", "unmatched", "steered")
"""Of those that `DecodeBench` knows."""


@dataclass(frozen=True, slots=True)
class Plan:
    """decode_pauses, prefill_pauses: in all; decode_rounds: of each width, in each of which every kind of turn has
    `decode_steps` steps.
    """

    decode_pauses: int
    prefill_pauses: int
    decode_rounds: int
    decode_steps: int


FULL = Plan(decode_pauses=400, prefill_pauses=200, decode_rounds=40, decode_steps=16)
QUICK = Plan(decode_pauses=20, prefill_pauses=10, decode_rounds=3, decode_steps=6)


@dataclass(frozen=True, slots=True)
class OnCpu:
    """The `Place` of this benchmark's engine."""

    device: str = "cpu"
    trace: Path | None = None


@dataclass(frozen=True, slots=True)
class DecodeRound:
    """Tokens per second of `width` sessions, by kind."""

    width: int
    rates: dict[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """The raw record of a run.

    other_cpu_share: share, 0 to 1, of the benchmark's cores that processes outside it used.
    """

    decode_pauses: list[PauseTimes]
    prefill_pauses: list[PauseTimes]
    rounds: list[DecodeRound]
    other_cpu_share: float


def measure(model: Path, plan: Plan, cores: list[int]) -> Measured:
    """Runs everything. Raises `NotAsMeant` if the engine fails or does something else than is measured."""
    torch.set_num_threads(len(cores))
    return measure_model(str(model), plan, cores)


def measure_model(model: str, plan: Plan, cores: list[int], **changed: object) -> Measured:
    """The same of a folder or a random model, with other settings of the engine."""
    place, random = OnCpu(), Random(0)
    watched = WatchedStack(load_layers(place, model, DTYPE), place.device)
    with build(place, model, watched, **{**SETTINGS, "kv_policy": "none", **changed}) as live:
        meter = CpuMeter(cores, time.process_time)
        pauses = PauseBench(live, watched, lambda count: random_tokens(random, count))
        return Measured(
            pauses.in_decode(plan.decode_pauses, PROMPT_TOKENS),
            pauses.in_prefill(plan.prefill_pauses, PREFILL_TOKENS),
            [entry for width in WIDTHS for entry in _decode(live, width, plan)],
            meter.other_share(),
        )


def _decode(live: LiveEngine, width: int, plan: Plan) -> list[DecodeRound]:
    steps = plan.decode_steps + WARM_UP_TOKENS
    bench = DecodeBench(live, width=width, prompt_tokens=PROMPT_TOKENS, steps=steps)
    return [DecodeRound(width, bench.round(*KINDS)) for _ in range(plan.decode_rounds + 1)][1:]


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


def _spreads(plan: Plan) -> str:
    return (
        f"Pauses: {plan.decode_pauses} in decode, {plan.prefill_pauses} in prefill. "
        f"Rounds of each width: {plan.decode_rounds}, with {plan.decode_steps} steps of each kind.\n"
        "Spreads are the middle half of the pauses or of the rounds."
    )


BENCHMARK = Benchmark(
    "breakpoints", "Breakpoints", __doc__, QUICK, FULL, measure, figures_of, lambda _: SETTINGS, _spreads
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
