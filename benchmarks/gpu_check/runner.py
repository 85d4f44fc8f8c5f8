"""The stages one after the other, within the time that there is, and then profiles of those that missed a target."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from benchmarks.gpu_check.plan import Plan
from benchmarks.gpu_check.processes import GRACE_S, run_alone
from benchmarks.gpu_check.reports.journal import Outcome, StageRecord
from benchmarks.gpu_check.reports.record import Run
from benchmarks.gpu_check.stage_list import Stage

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
