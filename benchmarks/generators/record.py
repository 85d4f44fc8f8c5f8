"""What is kept of one run: every raw round and what is needed to repeat it, and the table."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks import record
from benchmarks.generators.comparison import Comparison, Round
from benchmarks.generators.load import Load
from benchmarks.generators.report import DEFINITIONS, describe_load
from loadgen.processes.launch import Launch
from loadgen.results.tables import TextTable, to_markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(record.Run):
    """Everything that went into the JSON. rival_versions: by package; discarded: why pairs of runs were measured
    again.
    """

    rival_versions: dict[str, str]
    launch: Launch
    loads: tuple[Load, ...]
    rounds: list[Round]
    comparisons: list[Comparison]
    discarded: list[str]


def write_run(folder: Path, run: Run, table: TextTable) -> Path:
    """Writes `generators-CPU-CORES-DATE.json` and `.md`; returns the latter."""
    return record.write_run(folder, "generators-", run, _markdown(run, table))


def _markdown(run: Run, table: TextTable) -> str:
    own_latest = max(entry.own.latest_s for entry in run.rounds)
    rival_latest = max(entry.rival.latest_s for entry in run.rounds)
    others = max(entry.other_cpu_share for entry in run.rounds)
    lines = [
        f"# Two load generators on {run.model}, {run.place_and_time}",
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
