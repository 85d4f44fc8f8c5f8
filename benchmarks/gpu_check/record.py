"""What is kept of one run, and its files: written anew after every stage, so that an end by force loses nothing."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.figures import figure_table
from benchmarks.gpu_check.journal import Outcome, Point, StageRecord, read_figure
from benchmarks.gpu_check.plan import Plan
from benchmarks.machine import cpu_name
from benchmarks.tables import to_markdown

PACKAGES = ("djinn", "torch", "triton", "transformers", "accelerate", "numpy", "numba", "pydantic", "fastapi")
_QUERY = ("name", "driver_version", "memory.total")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures were taken on; `device` is the processor where there is no GPU, `driver` empty then."""

    device: str
    driver: str
    device_memory: str
    cpu: str
    cpus: int
    memory_bytes: int
    kernel: str
    python: str


@dataclass(slots=True)
class Run:
    """Everything that goes into the JSON. `plan` is a `Plan` as JSON has it."""

    date: str
    command: list[str]
    machine: Machine
    versions: dict[str, str]
    plan: dict[str, Any]
    stages: list[StageRecord] = field(default_factory=list)

    @property
    def stem(self) -> str:
        """The name of its files, such as `gpu-check-nvidia-h100-80gb-hbm3-2026-01-31T093000Z`."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.machine.device.lower()).strip("-")
        return f"gpu-check-{slug}-{self.date.replace(':', '')}"

    @property
    def is_well(self) -> bool:
        """Whether every stage is."""
        return all(stage.is_well for stage in self.stages)


def describe_machine(device: str) -> Machine:
    """This machine, as the driver's own tool and the kernel tell it."""
    found = _ask_driver() if device == "cuda" else []
    name, driver, memory = found if len(found) == len(_QUERY) else (cpu_name(), "", "")
    return Machine(
        device=name,
        driver=driver,
        device_memory=memory,
        cpu=cpu_name(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
    )


def _ask_driver() -> list[str]:
    """Of the first GPU; empty where there is no `nvidia-smi`."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [part.strip() for part in said.splitlines()[0].split(",")] if said.strip() else []


def installed_versions() -> dict[str, str]:
    """Of the packages that decide about the figures, as far as they are there."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_run(plan: Plan, date: str, command: Sequence[str]) -> Run:
    """A run that has not begun."""
    return Run(date, list(command), describe_machine(plan.device), installed_versions(), asdict(plan))


def write_run(run: Run, folder: Path) -> Path:
    """Write `STEM.json` and `STEM.md`, each whole or not at all; returns the former."""
    path = folder / f"{run.stem}.json"
    _replace(path, json.dumps(asdict(run), indent=1, ensure_ascii=False) + "\n")
    _replace(path.with_suffix(".md"), to_text(run))
    return path


def read_run(path: Path) -> Run:
    """A run from its JSON."""
    found = json.loads(path.read_text("utf-8"))
    stages = [_read_stage(stage) for stage in found["stages"]]
    return Run(**{**found, "machine": Machine(**found["machine"]), "stages": stages})


def _read_stage(found: dict[str, Any]) -> StageRecord:
    figures = [read_figure(figure) for figure in found["figures"]]
    points = [Point(**point) for point in found["points"]]
    return StageRecord(**{**found, "outcome": Outcome(found["outcome"]), "figures": figures, "points": points})


def heading(stage: StageRecord) -> str:
    """The stage and how it ended."""
    reason = f": {stage.reason}" if stage.reason else ""
    return f"{stage.title} ({stage.outcome.value} after {stage.seconds:.0f} s{reason})"


def origin(run: Run) -> list[str]:
    """Sentences that say what was run, and on what."""
    machine = run.machine
    driver = f", {machine.device_memory}, driver {machine.driver}" if machine.driver else ""
    return [
        f"{machine.device}{driver}; {machine.cpu}, {machine.cpus} CPUs, {machine.memory_bytes / 2**30:.0f} GiB; "
        f"Linux {machine.kernel}, Python {machine.python}; {run.date}",
        ", ".join(f"{name} {number}" for name, number in run.versions.items()),
        f"Plan: {run.plan['name']}",
    ]


def to_text(run: Run) -> str:
    """The run as Markdown."""
    parts = [f"# GPU check on {run.machine.device}", "", *(f"{line}\n" for line in origin(run))]
    parts += [f"    {' '.join(run.command)}", ""]
    for stage in run.stages:
        if stage.figures:
            parts.append(to_markdown(figure_table(heading(stage), stage.figures)))
        else:
            parts += [f"## {heading(stage)}", ""]
        parts += [f"- {name}: {value}" for name, value in stage.facts.items()]
        parts += [f"- {note}" for note in stage.notes]
        parts.append("")
    return "\n".join(parts)


def _replace(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.part")
    scratch.write_text(text, "utf-8")
    scratch.replace(path)
