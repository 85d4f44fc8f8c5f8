"""The result file of the experiment."""

from dataclasses import dataclass, field
from typing import Literal

from loadgen.experiments.capacity.limits import Miss
from loadgen.experiments.capacity.plan import CapacityPlan
from loadgen.load.records import Run
from loadgen.results.failures import Failure
from loadgen.results.files import Result
from loadgen.results.inputs import Server, Texts
from loadgen.results.per_target import PerTarget
from loadgen.stats import Summary


@dataclass(frozen=True, slots=True)
class Probe:
    """One run of `agents` agents, number `round` of that many, from 0.

    `ended_early`: it could only fail, so the rest of it was not run. `run` and `summary` are of what was.
    """

    agents: int
    round: int
    held: bool
    ended_early: bool
    misses: tuple[Miss, ...]
    trace_sha256: str
    prompts_sha256: str
    run: Run
    summary: Summary


@dataclass(slots=True)
class Findings:
    """Everything seen of one target, in order of time. It grows as the search goes on.

    `held` is the number of agents that the server holds, None if it does not hold the least. `failed` is the first
    number that failed, None if the most is held. Both are final once the search is `complete`.
    """

    probes: list[Probe] = field(default_factory=list)
    held: int | None = None
    failed: int | None = None
    complete: bool = False
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One target's part of a report."""

    server: Server
    findings: Findings

    @property
    def succeeded(self) -> bool:
        """Whether the search found a number that the server holds."""
        return self.findings.complete and self.findings.held is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReport(PerTarget, Result):
    """One run of the experiment. `arrive_within_s` is the mean time until all agents of a probe have arrived."""

    experiment: Literal["capacity"] = "capacity"
    plan: CapacityPlan
    arrive_within_s: float
    texts: Texts
    targets: tuple[TargetReport, ...]
