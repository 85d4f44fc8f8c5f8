"""All measurements of one run, one after the other, on one engine in this process."""

import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from benchmarks.breakpoints.plan import DTYPE, KINDS, PREFILL_TOKENS, PROMPT_TOKENS, SETTINGS, WIDTHS, Plan
from benchmarks.cpu_meter import CpuMeter
from benchmarks.engine.away import random_tokens
from benchmarks.engine.decoding import WARM_UP_TOKENS, DecodeBench
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import build, load_layers
from benchmarks.engine.pauses import PauseBench, PauseTimes
from benchmarks.engine.watched import WatchedStack


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
