"""What is kept of a run: JSON with all that was measured and what is needed to repeat it, Markdown with the tables."""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from loadgen.processes.launch import ROOT
from loadgen.report.origin import Machine, machine, versions

RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("djinn-server", "torch", "transformers", "numba", "numpy")
"""Those that decide about Djinn's speed."""


def utc_now() -> str:
    """Such as `2026-01-31T09:30:00Z`."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the record of every benchmark begins with. `machine.cpus`: how many cores the benchmark is bound to."""

    date: str = field(default_factory=utc_now)
    model: str
    machine: Machine = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=partial(versions, PACKAGES))

    @property
    def place_and_time(self) -> str:
        """For a heading."""
        return f"{self.machine.processor}, {self.machine.cpus} cores, {self.date}"


def file_stem(processor: str, cores: int, date: str) -> str:
    """Such as `avx2-avx512f-2-cores-2026-01-31T093000Z`."""
    return f"{slug(processor)}-{cores}-cores-{date.replace(':', '')}"


def slug(text: str) -> str:
    """`text` as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def write_run(folder: Path, prefix: str, run: Run, markdown: str) -> Path:
    """Writes `PREFIX FLAGS-CORES-DATE.json` and `.md`; returns the latter."""
    return write_results(folder, prefix + file_stem(run.machine.processor, run.machine.cpus, run.date), run, markdown)


def write_results(folder: Path, stem: str, run: Any, markdown: str) -> Path:
    """Writes `STEM.json` from the dataclass `run`, and `STEM.md`; returns the latter."""
    import orjson  # here: a bare GPU machine may lack it, and the check there writes its own files

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_bytes(orjson.dumps(run, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    path = folder / f"{stem}.md"
    path.write_text(markdown)
    return path
