"""What is kept of one run, and its files: written anew after every stage, so that an end by force loses nothing. The
page has its drawings by the load generator's kit: it needs Matplotlib and Jinja.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from app.doctor.device import read_release
from benchmarks.gpu_check.journal import Outcome, Point, StageRecord, read_figure
from benchmarks.record import slug, utc_now
from loadgen.report import origin
from loadgen.report.report import Chart, Report
from loadgen.report.tables import Row, Table, figure_table, to_markdown

PACKAGES = ("djinn-server", "torch", "triton", "transformers", "accelerate", "numpy", "numba", "pydantic", "fastapi")


@dataclass(frozen=True, slots=True)
class Device:
    """What the figures were taken on: the processor where there is no GPU, `driver` empty then."""

    name: str
    driver: str = ""
    memory: str = ""


@dataclass(slots=True)
class Run:
    """Everything that goes into the JSON. `plan` is a `Plan` as JSON has it."""

    date: str
    command: list[str]
    device: Device
    machine: origin.Machine
    versions: dict[str, str]
    plan: dict[str, Any]
    stages: list[StageRecord] = field(default_factory=list)

    @property
    def stem(self) -> str:
        """The name of its files, such as `gpu-check-nvidia-h100-80gb-hbm3-2026-01-31T093000Z`."""
        return f"gpu-check-{slug(self.device.name)}-{self.date.replace(':', '')}"

    @property
    def is_well(self) -> bool:
        """Whether every stage is."""
        return all(stage.is_well for stage in self.stages)


def describe_run(device: str, plan: dict[str, Any], command: Sequence[str]) -> Run:
    """A run that has not begun, on `cuda` or `cpu`."""
    here = origin.machine()
    found = _gpu() if device == "cuda" and torch.cuda.is_available() else Device(here.processor)
    return Run(utc_now(), list(command), found, here, origin.versions(PACKAGES), plan)


def _gpu() -> Device:
    properties = torch.cuda.get_device_properties(0)
    return Device(properties.name, read_release(Path("/")) or "", f"{properties.total_memory / 2**20:.0f} MiB")


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
    device, machine = Device(**found["device"]), _read_machine(found["machine"])
    return Run(**{**found, "device": device, "machine": machine, "stages": stages})


def _read_machine(found: dict[str, Any]) -> origin.Machine:
    return origin.Machine(**{**found, "flags": tuple(found["flags"])})


def _read_stage(found: dict[str, Any]) -> StageRecord:
    figures = [read_figure(figure) for figure in found["figures"]]
    points = [Point(**point) for point in found["points"]]
    return StageRecord(**{**found, "outcome": Outcome(found["outcome"]), "figures": figures, "points": points})


def heading(stage: StageRecord) -> str:
    """The stage and how it ended."""
    reason = f": {stage.reason}" if stage.reason else ""
    return f"{stage.title} ({stage.outcome.value} after {stage.seconds:.0f} s{reason})"


def provenance(run: Run) -> list[str]:
    """Sentences that say what was run, and on what."""
    device = run.device
    driver = f", {device.memory}, driver {device.driver or 'of unknown release'}" if device.memory else ""
    return [
        f"{device.name}{driver}; {run.machine}; {run.date}",
        ", ".join(f"{name} {number}" for name, number in run.versions.items()),
        f"Plan: {run.plan['name']}",
    ]


def to_text(run: Run) -> str:
    """The run as Markdown."""
    parts = [f"# GPU check on {run.device.name}", "", *(f"{line}\n" for line in provenance(run))]
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


POINTS = "Points"
CHARTS = {
    title: Chart(title, caption, "lines", POINTS, "x", "y", "series", {"chart": title}, *labels, *logs)
    for title, caption, labels, logs in (
        ("Pinned copies", "Plain copies between pinned host memory and the device.", ("MiB", "GB/s"), (True, False)),
        (
            "Back after a layer",
            "Until the model stands after the layer again, with all KV in place.",
            ("layers that had run", "ms"),
            (False, True),
        ),
        ("Streamed weights", "Tokens of all sessions together.", ("sessions", "tokens/s"), (True, True)),
        ("Decode", "Tokens of all sessions together.", ("sessions", "tokens/s"), (True, True)),
    )
}


def write_files(run: Run, data: Path) -> list[Path]:
    """Write the page and its drawings beside the JSON file `data`, in place of earlier ones; returns their paths.
    Raises `ModuleNotFoundError` where there is no Matplotlib or Jinja.
    """
    from loadgen.report.page import write_page, write_pictures

    report = make_report(run)
    html = data.with_suffix(".html")
    html.unlink(missing_ok=True)
    return [write_page(report, html), *write_pictures(report, html)]


def make_report(run: Run) -> Report:
    """What the page says."""
    points: list[Row] = [
        {"chart": point.chart, "series": point.series, "x": point.x, "y": point.y}
        for stage in run.stages
        for point in stage.points
    ]
    return Report(
        experiment="gpu-check",
        title=f"GPU check on {run.device.name}",
        lead=tuple(provenance(run)),
        plan=run.plan,
        figures=(),
        tables=(*map(_table, run.stages), Table(POINTS, points, shown=False)),
        charts=tuple(CHARTS.values()),
        command=tuple(run.command),
        machine=run.machine,
        versions=run.versions,
    )


def _table(stage: StageRecord) -> Table:
    text = " ".join([*(f"{name}: {value}." for name, value in stage.facts.items()), *stage.notes])
    return figure_table(heading(stage), stage.figures, text)
