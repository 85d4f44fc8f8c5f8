"""What an experiment found, and the JSON file that keeps it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import isinf
from pathlib import Path
from typing import Any

from loadgen.corpus import Corpus
from loadgen.records import Run, TurnRecord
from loadgen.stats import Summary
from loadgen.targets import TargetSpec
from loadgen.workload import Workload

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One target's part of a report."""

    spec: TargetSpec
    prompts_sha256: str
    run: Run
    summary: Summary


@dataclass(frozen=True, slots=True)
class Report:
    """One experiment."""

    experiment: str
    started_at: datetime
    workload: Workload
    corpus: Corpus
    targets: Sequence[TargetReport]


def write_json(report: Report, folder: Path) -> Path:
    """Write the report to a new file in `folder`, named after the experiment and its start; returns its path."""
    path = result_path(folder, report.experiment, report.started_at, "json")
    with path.open("x", encoding="utf-8") as file:
        json.dump(_as_json(report), file, indent=1, allow_nan=False)
    return path


def result_path(folder: Path, experiment: str, started_at: datetime, suffix: str) -> Path:
    """Where a result of an experiment goes."""
    return folder / f"{experiment}-{started_at.astimezone(UTC):%Y%m%dT%H%M%S.%fZ}.{suffix}"


def machine() -> dict[str, Any]:
    """Where the load generator ran."""
    return {"platform": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "experiment": report.experiment,
        "started_at": report.started_at.isoformat(),
        "machine": machine(),
        "workload": asdict(report.workload) | {"rate": None if isinf(report.workload.rate) else report.workload.rate},
        "corpus": {"name": report.corpus.name, "sha256": report.corpus.sha256},
        "targets": [_target_as_json(target) for target in report.targets],
    }


def _target_as_json(target: TargetReport) -> dict[str, Any]:
    """Never the API key."""
    return {
        "name": target.spec.name,
        "url": target.spec.url,
        "protocol": "djinn" if target.spec.model is None else "openai",
        "model": target.spec.model,
        "prompts_sha256": target.prompts_sha256,
        "summary": asdict(target.summary),
        "turns": [_turn_as_json(record) for record in target.run.turns],
        "signals": [asdict(record) for record in target.run.signals],
        "failures": [asdict(failure) for failure in target.run.failures],
    }


def _turn_as_json(record: TurnRecord) -> dict[str, Any]:
    times = record.token_times_s
    return {
        "agent": record.agent,
        "turn": record.turn,
        "due_s": record.due_s,
        "sent_s": record.sent_s,
        "ttft_s": times[0],
        "latency_s": record.latency_s,
        "token_events": len(times),
        **asdict(record.cost),
    }
