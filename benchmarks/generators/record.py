"""What is kept of one run: every raw round and what is needed to repeat it, and the table."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.generators.comparison import Comparison, Round
from benchmarks.generators.load import Load
from benchmarks.generators.report import DEFINITIONS, describe_load
from benchmarks.machine import Machine
from benchmarks.results import file_stem, write_results
from benchmarks.tables import TextTable, to_markdown
from loadgen.processes.launch import Launch


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that went into the JSON. versions: by environment, then by package; discarded: why pairs of runs
    were measured again.
    """

    date: str
    model: str
    machine: Machine
    versions: dict[str, dict[str, str]]
    launch: Launch
    loads: tuple[Load, ...]
    rounds: list[Round]
    comparisons: list[Comparison]
    discarded: list[str]


def write_run(folder: Path, run: Run, table: TextTable) -> Path:
    """Writes `generators-CPU-CORES-DATE.json` and `.md`; returns the latter."""
    stem = f"generators-{file_stem(run.machine.cpu, run.machine.cores, run.date)}"
    return write_results(folder, stem, run, _markdown(run, table))


def _markdown(run: Run, table: TextTable) -> str:
    own_latest = max(entry.own.latest_s for entry in run.rounds)
    rival_latest = max(entry.rival.latest_s for entry in run.rounds)
    others = max(entry.other_cpu_share for entry in run.rounds)
    lines = [
        f"# Two load generators on {run.model}, {run.machine.cpu}, {run.machine.cores} cores, {run.date}",
        "",
        DEFINITIONS,
        *(f"- {describe_load(load)}" for load in run.loads),
        "",
        f"Rounds: {1 + max(entry.number for entry in run.rounds)}. Figures are medians over rounds [lowest, highest].",
        f"Of the cores, processes outside the benchmark had at most {others:.1%}.",
        f"Requests were sent at most {own_latest:.3f} s late by loadgen, {rival_latest:.3f} s by GuideLLM.",
        *(f"Measured again: {reason}." for reason in run.discarded),
        "",
    ]
    return "\n".join([*lines, to_markdown(table)])
