"""What is kept of one run: the raw measurements, what is needed to repeat it, and the table."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.breakpoints.figures import figures_of
from benchmarks.breakpoints.plan import DTYPE, KV_DEVICE, Plan
from benchmarks.breakpoints.runner import Measured
from benchmarks.figures import Figure, figure_table
from benchmarks.machine import Machine, describe_machine, own_versions
from benchmarks.results import file_stem, utc_now, write_results
from benchmarks.tables import to_markdown

TITLE = "Breakpoints"


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that goes into the JSON. Seconds where a name ends so; the figures say their units."""

    date: str
    model: str
    machine: Machine
    versions: dict[str, str]
    plan: Plan
    settings: dict[str, str]
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
        settings={"dtype": DTYPE, "kv_device": KV_DEVICE},
        figures=figures_of(measured),
        measured=measured,
    )


def write_run(folder: Path, run: Run) -> Path:
    """Writes `breakpoints-CPU-CORES-DATE.json` and `.md`; returns the latter."""
    stem = f"breakpoints-{file_stem(run.machine.cpu, run.machine.cores, run.date)}"
    return write_results(folder, stem, run, _markdown(run))


def _markdown(run: Run) -> str:
    plan = run.plan
    heading = [
        f"# Breakpoints in {run.model} on {run.machine.cpu}, {run.machine.cores} cores, {run.date}",
        "",
        f"Pauses: {plan.decode_pauses} in decode, {plan.prefill_pauses} in prefill. "
        f"Rounds of each width: {plan.decode_rounds}, with {plan.decode_steps} steps of each kind.",
        "Spreads are the middle half of the pauses or of the rounds.",
        f"Processes outside the benchmark had {run.measured.other_cpu_share:.1%} of the cores.",
        "",
    ]
    return "\n".join([*heading, to_markdown(figure_table(TITLE, run.figures))])
