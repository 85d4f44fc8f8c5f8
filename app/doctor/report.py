"""What the doctor says, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from app.doctor.facts import Facts
from app.doctor.findings import Finding, Status

SEVERITY = list(Status)
STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.ERROR: "bold red"}


@dataclass(frozen=True, slots=True)
class Report:
    """device: what `djinn serve` would use. status: the worst of the findings. Its JSON is published as
    docs/doctor.schema.json; a change of its form is another `schema_version`.
    """

    schema_version: Literal[1]
    device: str
    status: Status
    findings: list[Finding]
    facts: Facts

    @classmethod
    def of(cls, device: str, findings: Sequence[Finding], facts: Facts) -> Report:
        """The report of an examination."""
        worst = max((finding.status for finding in findings), key=SEVERITY.index)
        return cls(1, device, worst, list(findings), facts)

    def to_json(self) -> str:
        """One JSON object, indented."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    def print(self, console: Console) -> None:
        """A line for each finding, and under it the remedy; never broken, so that a command can be copied."""
        for finding in self.findings:
            line = Text.assemble(
                (f"{finding.status:<9}", STYLES[finding.status]),
                (f"{finding.name.replace('_', ' '):<20}", "bold"),
                finding.summary,
            )
            console.print(line, soft_wrap=True)
            if finding.remedy is not None:
                console.print(Text(f"{'':<9}-> {finding.remedy}"), soft_wrap=True)
        console.print(self._verdict(), soft_wrap=True)

    def _verdict(self) -> Text:
        counts = {status: sum(finding.status is status for finding in self.findings) for status in SEVERITY}
        parts = [
            f"{counts[status]} {status}{'s' * (counts[status] > 1)}" for status in SEVERITY[:0:-1] if counts[status]
        ]
        return Text(f"\n{self.device}: {', '.join(parts) or 'all is well'}", STYLES[self.status])
