"""What a stage is given."""

import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_check.plan import Plan
from benchmarks.gpu_check.reports.journal import Journal


class SkipStage(Exception):
    """The stage has a reason not to run, which is the message."""


@dataclass(frozen=True, slots=True)
class StageContext:
    """`deadline` is on `time.monotonic`. Files go to `output`. `trace`: where the engine's work is to be traced to."""

    plan: Plan
    journal: Journal
    deadline: float
    output: Path
    trace: Path | None = None

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return self.plan.device

    @property
    def left_s(self) -> float:
        """Seconds until whoever started the stage ends it."""
        return self.deadline - time.monotonic()
