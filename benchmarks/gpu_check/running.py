"""The check from its options to its files and its table: the stages one after the other, each in a process of its own
that is ended when its time is over, and then profiles of those that missed a target.

`python -m benchmarks.gpu_check.running STAGE ...` is one stage. A fault of a kernel makes CUDA unusable for the rest
of a process: of one stage, that way, and not of all.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import psutil
import torch
from rich.console import Console

from benchmarks.gpu_check.journal import Journal, Outcome, SkipStage, StageContext, StageRecord, read_journal
from benchmarks.gpu_check.overlay import ROOT
from benchmarks.gpu_check.plan import CPU, FULL, PLANS, TINY, Plan, profiled
from benchmarks.gpu_check.record import Run, describe_run, heading, read_run, write_files, write_run
from loadgen.report.tables import figure_table, to_rich

_ENGINE = ("torch", "transformers", "psutil", "rich", "pydantic", "pydantic_settings")
_PYTEST = ("pytest", "pytest_asyncio", "pytest_timeout")
_HTTP = ("fastapi", "uvicorn", "orjson", "httpx", "httpx_sse", "prometheus_client")


@dataclass(frozen=True, slots=True)
class Stage:
    """`budget_s`: how long it may take; `least_s`: with less than that it is not begun. `needs` are modules that it
    imports, `file` has it. `profiled`: whether it computes in its own process, where a profiler sees it.
    """

    name: str
    title: str
    budget_s: float
    least_s: float
    needs: tuple[str, ...]
    file: str
    profiled: bool = True

    @property
    def module(self) -> str:
        """Where its function is: `stage_` and its name."""
        return f"benchmarks.gpu_check.stages.{self.file}"


STAGES = (
    Stage("doctor", "What `djinn doctor` says", 15, 10, _ENGINE, "machine", profiled=False),
    Stage("copies", "Plain copies", 25, 10, ("torch", "numpy"), "moves", profiled=False),
    Stage("swap", "Sessions that leave the device and come back", 35, 25, _ENGINE, "moves"),
    Stage("resume", "Back where a session was", 35, 25, _ENGINE, "moves"),
    Stage("decode", "Decode beside Transformers and the bytes limit", 90, 35, _ENGINE, "decode"),
    Stage("breakpoints", "What breakpoints cost", 60, 35, _ENGINE, "sessions"),
    Stage("sessions", "More sessions than the device holds", 75, 50, _ENGINE, "sessions"),
    Stage("weights", "A model larger than its share of the device", 110, 60, (*_ENGINE, "accelerate"), "weights"),
    Stage("density", "Eighty agents over HTTP", 130, 115, (*_ENGINE, *_HTTP), "agents", profiled=False),
    Stage("vllm", "Beside vLLM", 300, 120, (*_ENGINE, *_HTTP), "agents", profiled=False),
    Stage("cuda_tests", "CUDA tests", 110, 60, (*_ENGINE, *_PYTEST), "machine", profiled=False),
)


def run_stage(
    stage: Stage, plan: Plan, journal_path: Path, output: Path, budget_s: float, trace: Path | None = None
) -> None:
    """Run the stage on this thread; whatever happens to it is in the journal."""
    with journal_path.open("w", encoding="utf-8") as file:
        journal = Journal(file, has_targets=plan.has_targets)
        missing = [name for name in stage.needs if find_spec(name) is None]
        if missing:
            journal.end(Outcome.SKIPPED, f"not installed: {', '.join(missing)}")
            return
        deadline = time.monotonic() + budget_s
        journal.end(*_outcome(stage, StageContext(plan, journal, deadline, output, trace)))


def _outcome(stage: Stage, context: StageContext) -> tuple[Outcome, str]:
    try:
        getattr(import_module(stage.module), f"stage_{stage.name}")(context)
    except SkipStage as error:
        return Outcome.SKIPPED, str(error)
    except ModuleNotFoundError as error:
        return Outcome.SKIPPED, f"not installed: {error.name}"
    except Exception as error:
        traceback.print_exc()
        return Outcome.FAILED, f"{type(error).__name__}: {error}"
    return Outcome.DONE, ""


def main() -> int:
    """Runs the stage that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=[stage.name for stage in STAGES])
    parser.add_argument("--plan", choices=list(PLANS), required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    stage = next(each for each in STAGES if each.name == options.stage)
    plan = PLANS[options.plan]
    plan = plan if options.trace is None else profiled(plan)
    run_stage(stage, plan, options.journal, options.output, options.budget, options.trace)
    return 0


GRACE_S = 3.0
"""Beyond its budget, for a stage that watches the clock itself."""


def run_alone(
    stage: Stage, plan: Plan, output: Path, log: IO[str], budget_s: float, trace: Path | None = None
) -> StageRecord:
    """The record of a stage that had `budget_s` seconds. What it prints goes to `log`.

    On a GPU it runs in a process of its own. On a CPU, where a stage takes no longer than the start of a process, it
    runs in this one.
    """
    record, began = StageRecord(stage.name, stage.title), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        if plan.device == "cpu":
            run_stage(stage, plan if trace is None else profiled(plan), journal, output, budget_s, trace)
        else:
            command = [stage.name, "--plan", plan.name, "--journal", str(journal), "--output", str(output)]
            command += ["--budget", f"{budget_s:.1f}", *([] if trace is None else ["--trace", str(trace)])]
            _note_end(record, run_for(command, log, budget_s + GRACE_S))
        if journal.exists():
            read_journal(journal, record)
    record.seconds = time.monotonic() - began
    return record


def _note_end(record: StageRecord, status: int | None) -> None:
    """What is to be said of a stage that could not say itself how it ended."""
    if status is None:
        record.reason = "its time was over"
    elif status != 0:
        record.outcome, record.reason = Outcome.FAILED, f"its process ended with status {status}"


def run_for(arguments: Sequence[str], log: IO[str], seconds: float) -> int | None:
    """Exit status of the child that has these arguments; None if it had to be killed after so many seconds."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.running", *arguments]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of it, a server that it has started in a session of its own included."""
    family = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


PROFILE_S = 60.0
LEAST_PROFILE_S = 30.0


class Budget:
    """Seconds of the whole run."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """What a stage that begins now can have: its process is ended `GRACE_S` after its budget."""
        return self._end - time.monotonic() - GRACE_S


def run_stages(
    stages: Sequence[Stage],
    plan: Plan,
    run: Run,
    budget: Budget,
    files: tuple[Path, IO[str]],
    on_record: Callable[[StageRecord], None],
) -> None:
    """Run them, and add each one's record to the run; `on_record` is called after each. `files`: output folder, log."""
    output, log = files
    for stage in stages:
        seconds = min(stage.budget_s, budget.left_s)
        if plan.device != "cpu" and seconds < stage.least_s:
            record = StageRecord(stage.name, stage.title, Outcome.OUT_OF_TIME, "no time was left to begin it")
        else:
            record = run_alone(stage, plan, output, log, seconds)
        run.stages.append(record)
        on_record(record)


def run_profiles(
    stages: Sequence[Stage],
    plan: Plan,
    run: Run,
    budget: Budget,
    files: tuple[Path, IO[str]],
    asked: Sequence[str],
    on_profile: Callable[[Path], None],
) -> None:
    """Trace the stages that are `asked` for, then those that missed a target, as far as there is time."""
    output, log = files
    missed = [record.name for record in run.stages if record.missed]
    by_name = {stage.name: stage for stage in stages if stage.profiled}
    for name in dict.fromkeys([*asked, *missed]):
        seconds = min(PROFILE_S, budget.left_s)
        if name in by_name and (plan.device == "cpu" or seconds >= LEAST_PROFILE_S):
            trace = output / f"{run.stem}-{name}.json.gz"
            run_alone(by_name[name], plan, output, log, seconds, trace)
            if trace.exists():
                on_profile(trace)


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
    plan = TINY if options.tiny else CPU if options.cpu else FULL
    if plan is FULL and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no CUDA device here; --cpu runs the same stages on a CPU, with a small model")
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
        paths = write_files(run, data)
    except ModuleNotFoundError as error:
        console.print(f"no page, for want of {error.name}: --page draws it where that is installed")
        return
    for path in paths:
        console.print(f"written: {path}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
