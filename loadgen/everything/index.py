"""The page that leads to the reports of all experiments."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.everything.stages import Stage
from loadgen.report.origin import machine, versions
from loadgen.report.page import environment
from loadgen.report.text import duration

PICTURES = 2
"""How many of a report's figures the index shows."""

OUTCOMES = {
    0: "all went well",
    1: "something failed, or missed its target",
    2: "could not run",
    130: "interrupted",
}
"""By exit code."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended; `page` is None if it wrote none. The figures lie beside the page, under its name."""

    stage: Stage
    exit_code: int
    seconds: float
    page: Path | None

    @property
    def words(self) -> str:
        """How it ended, and after how long."""
        return f"{OUTCOMES.get(self.exit_code, f'broke off with exit code {self.exit_code}')}, {duration(self.seconds)}"

    @property
    def pictures(self) -> list[str]:
        """File names of the first figures of its report."""
        if self.page is None:
            return []
        drawn = self.page.parent.glob(f"{self.page.stem}-*.png")
        return [path.name for path in sorted(drawn, key=lambda path: path.stat().st_mtime_ns)[:PICTURES]]


def write_index(outcomes: Sequence[Outcome], command: Sequence[str], folder: Path) -> Path:
    """Write `folder`/index.html anew; returns its path. Raises OSError."""
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    path = folder / "index.html"
    path.write_text(
        environment()
        .get_template("index.html")
        .render(outcomes=outcomes, lead=(" ".join(command), str(machine()), packages)),
        encoding="utf-8",
    )
    return path
