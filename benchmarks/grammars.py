"""`python -m benchmarks.grammars`: what JSON schemas cost sessions that decode."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from app.domain.values import Grammar, GrammarKind, SamplingParams
from app.gpu.engine import Engine
from app.gpu.startup.loader import load_engine
from app.model_store.resolve import load_tokenizer
from benchmarks.command import OwnRun, bind_to_cores, exit_status, finish, make_parser
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import find_model, make_settings
from benchmarks.measuring import CpuMeter, middle_half
from loadgen.report.tables import Figure, Target

DTYPE = "float32"
SETTINGS = {"dtype": DTYPE, "kv_device": "256MiB", "max_model_len": 1024}
WIDTHS = (1, 32)
"""How many sessions decode at once."""
TEMPERATURE = 0.8
PROMPT = "A list of people as JSON:"

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer"},
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "member"],
    "additionalProperties": False,
}
PEOPLE = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": _PERSON, "minItems": 500}), "schema")
"""Longer than any turn here, so that every turn has as many tokens as one without a grammar."""


@dataclass(frozen=True, slots=True)
class Plan:
    """rounds: of each width, in each of which both kinds of turn have `steps` steps."""

    rounds: int
    steps: int


FULL = Plan(rounds=10, steps=40)
QUICK = Plan(rounds=2, steps=8)


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


HELD = Target(1.05)


def figures_of(measured: Measured) -> list[Figure]:
    """The whole table. Ratios are taken within a round, before the median over rounds."""
    figures = []
    for width in WIDTHS:
        rounds = [entry for entry in measured.rounds if entry.width == width]
        name = "1 session" if width == 1 else f"{width} sessions"
        figures += [
            Figure(f"Decode step, {name}", "ms", middle_half([entry.free_s * 1e3 for entry in rounds])),
            Figure(f"Decode step, {name}, each with a schema", "ms", middle_half([e.held_s * 1e3 for e in rounds])),
            Figure(
                f"Step with schemas / without, {name}", "×", middle_half([e.held_s / e.free_s for e in rounds]), HELD
            ),
        ]
    return figures


def describe(model: str, plan: Plan, measured: Measured) -> tuple[OwnRun, str]:
    """The record, and what its spreads mean."""
    note = (
        f"Rounds of each width: {plan.rounds}, with {plan.steps} steps of each kind at temperature {TEMPERATURE}.\n"
        "Spreads are the middle half of the rounds."
    )
    return OwnRun(model=model, plan=plan, settings=SETTINGS, figures=figures_of(measured), measured=measured), note


def main() -> int:
    """Run it as the command line asks; returns the process's exit status."""
    arguments = make_parser("python -m benchmarks.grammars", __doc__).parse_args()
    plan: Plan = QUICK if arguments.quick else FULL

    def run() -> None:
        measured = measure(arguments.model, plan, bind_to_cores(arguments.cores))
        finish(arguments, "grammars", "Grammars", *describe(arguments.model.name, plan, measured))

    return exit_status(arguments.model, run)


if __name__ == "__main__":
    sys.exit(main())
