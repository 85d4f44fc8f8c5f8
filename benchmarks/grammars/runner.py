"""Decode steps of sessions with a grammar and of sessions without one, in turns, on one engine in this process."""

import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from app.domain.values import Grammar, SamplingParams
from app.gpu.engine import Engine
from app.gpu.startup.loader import load_engine
from app.model_store.tokenizer import load_tokenizer
from benchmarks.cpu_meter import CpuMeter
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import find_model, make_settings
from benchmarks.grammars.plan import PEOPLE, PROMPT, SETTINGS, TEMPERATURE, WIDTHS, Plan


@dataclass(frozen=True, slots=True)
class DecodeRound:
    """Median time of one step of `width` sessions, in seconds: without a grammar, and with one each."""

    width: int
    free_s: float
    held_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The raw record of a run.

    other_cpu_share: share, 0 to 1, of the benchmark's cores that processes outside it used.
    """

    rounds: list[DecodeRound]
    other_cpu_share: float


def measure(model: Path, plan: Plan, cores: list[int]) -> Measured:
    """Runs everything. Raises `NotAsMeant` if the engine fails."""
    torch.set_num_threads(len(cores))
    engine = make_engine(model)
    engine.grammars.compile(PEOPLE).result()
    prompt = load_tokenizer(find_model(str(model))).backend.encode(PROMPT).ids
    with LiveEngine(engine) as live:
        meter = CpuMeter(cores, time.process_time)
        rounds = [entry for width in WIDTHS for entry in _rounds(live, prompt, width, plan)]
        return Measured(rounds, meter.other_share())


def _rounds(live: LiveEngine, prompt: list[int], width: int, plan: Plan) -> list[DecodeRound]:
    """The first round fills caches and is dropped."""
    return [
        DecodeRound(width, _step_s(live, prompt, None, width, plan), _step_s(live, prompt, PEOPLE, width, plan))
        for _ in range(plan.rounds + 1)
    ][1:]


def make_engine(model: Path) -> Engine:
    """An engine for as many sessions at once as are measured."""
    settings = make_settings("cpu", str(model), max_running=max(WIDTHS), **SETTINGS)
    return load_engine(find_model(str(model)), settings.engine())


def _step_s(live: LiveEngine, prompt: list[int], grammar: Grammar | None, width: int, plan: Plan) -> float:
    """Median time between two tokens of a turn while all turns decode."""
    sessions = [live.open() for _ in range(width)]
    turns = [
        live.submit(session, prompt, plan.steps, SamplingParams(seed=row, temperature=TEMPERATURE, grammar=grammar))
        for row, session in enumerate(sessions)
    ]
    live.finish(*turns)
    live.close(*sessions)
    times = [turn.times for turn in turns]
    begin, end = max(each[1] for each in times), min(each[-1] for each in times)
    return statistics.median(b - a for each in times for a, b in itertools.pairwise(each) if begin <= a and b <= end)
