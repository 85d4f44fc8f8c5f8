"""The check from its options to its files and its table."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.gpu_check.plan import FULL, TINY
from benchmarks.gpu_check.reports.journal import StageRecord
from benchmarks.gpu_check.reports.record import Run, describe_run, heading, read_run, write_run
from benchmarks.gpu_check.runner import Budget, run_profiles, run_stages
from benchmarks.gpu_check.stage_list import STAGES, Stage
from loadgen.report.tables import figure_table, to_rich

FILE_WIDTH = 150
"""Of the tables where nobody looks: a terminal of 80 columns would break every label."""


def run_check(options: argparse.Namespace) -> bool:
    """Run the stages that are asked for; whether all is well. Raises SystemExit for a stage that is unknown, and where
    there is no GPU.
    """
    budget = Budget(options.time_limit)
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    stages = _choose(options.only)
    _choose(options.profile)
    plan = TINY if options.tiny else FULL
    if plan is FULL and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no CUDA device here; --tiny runs the same stages on a CPU, with a tiny model")
    run = describe_run(plan.device, asdict(plan), _command())
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    data = write_run(run, output)

    def keep(record: StageRecord) -> None:
        write_run(run, output)
        _show(record, console)

    with data.with_suffix(".log").open("w", encoding="utf-8") as log:
        files = output, log
        run_stages(stages, plan, run, budget, files, keep)
        run_profiles(STAGES, plan, run, budget, files, options.profile, lambda trace: console.print(f"trace: {trace}"))
    _finish(run, data, console)
    return run.is_well


def write_page_of(data: Path) -> int:
    """Draw the page of an earlier run beside its JSON."""
    from benchmarks.gpu_check.reports.page import write_files

    for path in write_files(read_run(data), data):
        print(path)
    return 0


def _choose(names: list[str]) -> list[Stage]:
    known = {stage.name: stage for stage in STAGES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"there is no stage {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names] or list(STAGES)


def _command() -> list[str]:
    """The command line without the folders of this machine."""
    arguments = [Path(each).name if "/" in each else each for each in sys.argv[1:]]
    return ["python", "-m", "benchmarks.gpu_check", *arguments]


def _show(record: StageRecord, console: Console) -> None:
    if record.figures:
        console.print(to_rich([figure_table(heading(record), record.figures)]))
    else:
        console.print(heading(record), markup=False)
    for note in record.notes:
        console.print(f"  {note}", markup=False)


def _finish(run: Run, data: Path, console: Console) -> None:
    console.print(f"written: {data}", soft_wrap=True)
    try:
        from benchmarks.gpu_check.reports.page import write_files
    except ModuleNotFoundError as error:
        console.print(f"no page, for want of {error.name}: --page draws it where that is installed")
        return
    for path in write_files(run, data):
        console.print(f"written: {path}", soft_wrap=True)
