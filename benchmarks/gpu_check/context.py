"""What a stage is given."""

import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_check.journal import Journal
from benchmarks.gpu_check.plan import Plan


class SkipStage(Exception):
    """The stage has a reason not to run, which is the message."""


class StageFailed(Exception):
    """What was measured is not what was meant, or could not be measured."""


@dataclass(frozen=True, slots=True)
class StageContext:
    """`deadline` is on `time.monotonic`. Files go to `output`. `trace`: where the engine's work is to be traced to."""

    plan: Plan
    journal: Journal
    deadline: float
    output: Path
    trace: Path | None = None

    @property
    def left_s(self) -> float:
        """Seconds until whoever started the stage ends it."""
        return self.deadline - time.monotonic()
