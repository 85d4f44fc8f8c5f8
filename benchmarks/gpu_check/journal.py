"""What a stage is given, and what it has found, a line of a file for each thing: whoever ends the stage loses nothing
of it.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu_check.plan import Plan
from loadgen.report.tables import Figure, Spread, Target
from loadgen.report.tables import Outcome as Verdict


class Outcome(StrEnum):
    """How a stage ended."""

    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    OUT_OF_TIME = "out of time"


@dataclass(frozen=True, slots=True)
class Point:
    """Of the line `series` in the figure `chart`."""

    chart: str
    series: str
    x: float
    y: float


@dataclass(slots=True)
class StageRecord:
    """Everything that is kept of a stage. `samples` are the raw values behind its figures."""

    name: str
    title: str
    outcome: Outcome = Outcome.OUT_OF_TIME
    reason: str = ""
    seconds: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def missed(self) -> list[Figure]:
        """Figures that are not what they should be."""
        good = (None, Verdict.MET)
        return [each for each in self.figures if each.outcome not in good]

    @property
    def is_well(self) -> bool:
        """Whether nothing speaks against it: it ran to its end, or had a reason not to run, and met every target."""
        return self.outcome in (Outcome.DONE, Outcome.SKIPPED) and not self.missed


class Journal:
    """Writes the file, line by line. Without `has_targets` figures are only reported."""

    def __init__(self, file: TextIO, *, has_targets: bool) -> None:
        self._file = file
        self._has_targets = has_targets

    def figure(self, label: str, unit: str, spread: Spread, target: Target | None = None) -> None:
        """A line of the table."""
        figure = Figure(label, unit, spread, target if self._has_targets else None)
        self._write("figure", asdict(figure))

    def value(self, label: str, unit: str, value: float, target: Target | None = None) -> None:
        """The same for a single value."""
        self.figure(label, unit, Spread.over([value]), target)

    def point(self, chart: str, series: str, x: float, y: float) -> None:
        """A point of a drawing."""
        self._write("point", asdict(Point(chart, series, x, y)))

    def samples(self, name: str, values: Sequence[float]) -> None:
        """Raw values."""
        self._write("samples", {"name": name, "values": list(values)})

    def fact(self, name: str, value: object) -> None:
        """Something that must be known to repeat it."""
        self._write("fact", {"name": name, "value": str(value)})

    def note(self, text: str) -> None:
        """Something that a reader must know."""
        self._write("note", text)

    def end(self, outcome: Outcome, reason: str = "") -> None:
        """The last line; a file without one is of a stage that was ended."""
        self._write("end", {"outcome": outcome.value, "reason": reason})

    def _write(self, kind: str, value: Any) -> None:
        self._file.write(json.dumps([kind, value]) + "\n")
        self._file.flush()


def read_journal(path: Path, record: StageRecord) -> None:
    """Take into `record` all that was written, up to a line that is not whole."""
    for line in path.read_text("utf-8").splitlines():
        try:
            kind, value = json.loads(line)
        except ValueError:
            return
        match kind:
            case "figure":
                record.figures.append(read_figure(value))
            case "point":
                record.points.append(Point(**value))
            case "samples":
                record.samples[value["name"]] = value["values"]
            case "fact":
                record.facts[value["name"]] = value["value"]
            case "note":
                record.notes.append(value)
            case "end":
                record.outcome, record.reason = Outcome(value["outcome"]), value["reason"]


def read_figure(value: dict[str, Any]) -> Figure:
    """A figure from its JSON; in files of before November 2026 its name is its label."""
    target = value["target"] and Target(**value["target"])
    return Figure(value.get("name") or value["label"], value["unit"], Spread(**value["spread"]), target)


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
