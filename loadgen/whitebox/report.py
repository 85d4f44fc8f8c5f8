"""What the experiment found, and the JSON file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from math import isinf
from pathlib import Path
from typing import Any

from loadgen.corpus import Corpus
from loadgen.report import machine, result_path
from loadgen.targets import TargetSpec
from loadgen.whitebox.findings import Findings
from loadgen.whitebox.plan import WhiteboxPlan
from loadgen.whitebox.summary import Summary
from loadgen.whitebox.verdicts import Outcome, Verdict

EXPERIMENT = "whitebox"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One target's part of a report."""

    spec: TargetSpec
    layers: tuple[int, ...]
    prompts_sha256: str
    findings: Findings
    summary: Summary
    verdicts: Sequence[Verdict]

    @property
    def succeeded(self) -> bool:
        """Whether everything could be measured that the server tells, and no target is missed."""
        missed = any(verdict.outcome is Outcome.MISSED for verdict in self.verdicts)
        return not (missed or self.findings.failures or self.findings.interrupted)


@dataclass(frozen=True, slots=True)
class WhiteboxReport:
    """One run of the experiment."""

    started_at: datetime
    plan: WhiteboxPlan
    corpus: Corpus
    targets: Sequence[TargetReport]


def write_json(report: WhiteboxReport, folder: Path) -> Path:
    """Write the report to a new file in `folder`, named after the experiment and its start; returns its path."""
    path = result_path(folder, EXPERIMENT, report.started_at, "json")
    with path.open("x", encoding="utf-8") as file:
        json.dump(_as_json(report), file, indent=1, allow_nan=False)
    return path


def _as_json(report: WhiteboxReport) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "experiment": EXPERIMENT,
        "started_at": report.started_at.isoformat(),
        "machine": machine(),
        "plan": asdict(report.plan),
        "corpus": {"name": report.corpus.name, "sha256": report.corpus.sha256},
        "targets": [_target_as_json(target) for target in report.targets],
    }


def _target_as_json(target: TargetReport) -> dict[str, Any]:
    """Never the API key."""
    findings = target.findings
    histograms = {
        name: [{"upper": None if isinf(bucket.upper) else bucket.upper, "count": bucket.count} for bucket in buckets]
        for name, buckets in findings.histograms.items()
    }
    return {
        "name": target.spec.name,
        "url": target.spec.url,
        "layers": target.layers,
        "prompts_sha256": target.prompts_sha256,
        "verdicts": [asdict(verdict) for verdict in target.verdicts],
        "summary": asdict(target.summary),
        "trials": [asdict(trial) for trial in findings.trials],
        "round_trips": [asdict(trip) for trip in findings.round_trips],
        "saved": [asdict(saved) for saved in findings.saved],
        "steered": [asdict(turn) for turn in findings.steered],
        "rates": [rates.tokens_per_s for rates in findings.rates],
        "windows": [asdict(window) for window in findings.windows],
        "memory": {when: memory.model_dump() for when, memory in findings.memory.items()},
        "histograms": histograms,
        "failures": [asdict(failure) for failure in findings.failures],
        "interrupted": findings.interrupted,
    }
