"""What the experiment found, as it is written to a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadgen.reporting.files import Result
from loadgen.reporting.inputs import Server, Texts
from loadgen.verdicts import Verdict, all_well
from loadgen.weights.chunks import Choice, ChunkRow
from loadgen.weights.findings import Findings
from loadgen.weights.plan import WeightsPlan
from loadgen.weights.sizes import ModelBytes
from loadgen.weights.summary import Summary


@dataclass(frozen=True, slots=True)
class Model:
    """What ran, of which `budget_bytes` of weights may be on the device."""

    name: str
    dtype: str
    bytes: ModelBytes
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReport(Result):
    """One run of the experiment: a comparison, or a sweep over `chunks` from which one is chosen."""

    experiment: Literal["weights"] = "weights"
    plan: WeightsPlan
    texts: Texts
    model: Model
    servers: tuple[Server, ...]
    findings: Findings
    summary: Summary
    chunks: tuple[ChunkRow, ...]
    choice: Choice | None
    verdicts: tuple[Verdict, ...]

    @property
    def interrupted(self) -> bool:
        """See `Result`."""
        return self.findings.interrupted

    @property
    def succeeded(self) -> bool:
        """See `Result`."""
        return all_well(self.verdicts, self.findings.failures, interrupted=self.interrupted)
