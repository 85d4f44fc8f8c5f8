"""What is kept of one run: the raw measurements, what is needed to repeat it, and the table."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure, figure_table
from benchmarks.kv.figures import figures_of
from benchmarks.kv.plan import Plan
from benchmarks.kv.runner import Measured, server_launch
from benchmarks.machine import Machine, describe_machine, own_versions
from benchmarks.results import file_stem, utc_now, write_results
from benchmarks.tables import to_markdown
from loadgen.processes.launch import ROOT, Launch, without_folders

TITLE = "KV between tiers"


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that goes into the JSON. Seconds and bytes where a name ends so; the figures say their units."""

    date: str
    model: str
    machine: Machine
    versions: dict[str, str]
    plan: Plan
    launch: Launch
    figures: list[Figure]
    measured: Measured


def describe_run(model: Path, plan: Plan, cores: list[int], measured: Measured) -> Run:
    """Gathers the record."""
    return Run(
        date=utc_now(),
        model=model.name,
        machine=describe_machine(cores),
        versions=own_versions(),
        plan=plan,
        launch=without_folders(server_launch(model, port=0), [ROOT, model.parent]),
        figures=figures_of(measured),
        measured=measured,
    )


def write_run(folder: Path, run: Run) -> Path:
    """Writes `kv-CPU-CORES-DATE.json` and `.md`; returns the latter."""
    stem = f"kv-{file_stem(run.machine.cpu, run.machine.cores, run.date)}"
    return write_results(folder, stem, run, _markdown(run))


def _markdown(run: Run) -> str:
    plan = run.plan
    heading = [
        f"# KV of {run.model} on {run.machine.cpu}, {run.machine.cores} cores, {run.date}",
        "",
        f"Copies: {plan.copies.allocations * plan.copies.rounds} of each kind. "
        f"Turns: {plan.resume_rounds} of each kind. Sessions parked twice: {plan.parks}. Signals: {plan.signals}.",
        "Spreads are the middle half of the rounds, those of parks and first moves the lowest and the highest.",
        f"Processes outside the benchmark had at most {run.measured.other_cpu_share:.1%} of the cores.",
        "",
    ]
    return "\n".join([*heading, to_markdown(figure_table(TITLE, run.figures))])
