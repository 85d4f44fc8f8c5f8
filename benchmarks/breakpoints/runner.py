"""All measurements of one run, one after the other, on one engine in this process."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.breakpoints.decoding import DecodeBench, DecodeRound
from benchmarks.breakpoints.engine import BenchEngine
from benchmarks.breakpoints.pauses import PauseTimes, measure_decode_pauses, measure_prefill_pauses
from benchmarks.breakpoints.plan import WIDTHS, Plan
from benchmarks.cpu_meter import CpuMeter
from benchmarks.text import TokenSource, read_text_tokens

SEED = 0


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
    """Runs everything. Raises ServerFailedError if the engine fails or does something else than is measured."""
    torch.set_num_threads(len(cores))
    bench, source = BenchEngine(str(model)), TokenSource(read_text_tokens(model))
    meter = CpuMeter(cores, time.process_time)
    decode_pauses = measure_decode_pauses(bench, source, plan.decode_pauses)
    prefill_pauses = measure_prefill_pauses(bench, source, plan.prefill_pauses)
    decoding = DecodeBench(bench, source, SEED, plan.decode_steps)
    rounds = [entry for width in WIDTHS for entry in decoding.run(width, plan.decode_rounds)]
    return Measured(decode_pauses, prefill_pauses, rounds, meter.other_share())
