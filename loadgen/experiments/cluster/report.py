"""The result file of the experiment."""

from dataclasses import dataclass
from typing import Literal

from loadgen.experiments.cluster.findings import Findings
from loadgen.experiments.cluster.plan import ClusterPlan, Router
from loadgen.load.records import Run
from loadgen.load.workload import Replay, Workload
from loadgen.results.files import Result
from loadgen.results.inputs import Server, Texts
from loadgen.results.verdicts import Verdict, all_well
from loadgen.stats import Summary


def run_name(replicas: int, router: Router) -> str:
    """What the run on a cluster of that size is called."""
    return f"{replicas} replica{'' if replicas == 1 else 's'}{', hashed' if router is Router.HASH else ''}"


@dataclass(frozen=True, slots=True)
class SizeReport:
    """The run on a cluster of so many `replicas`, with one router. `pinned`: each replica had a core to itself."""

    replicas: int
    router: Router
    pinned: bool
    server: Server
    run: Run
    summary: Summary
    findings: Findings
    verdicts: tuple[Verdict, ...]

    @property
    def name(self) -> str:
        """What it is called in tables and figures."""
        return run_name(self.replicas, self.router)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport(Result):
    """One run of the experiment."""

    experiment: Literal["cluster"] = "cluster"
    plan: ClusterPlan
    workload: Workload | Replay
    trace_sha256: str
    prompts_sha256: str
    texts: Texts
    sizes: tuple[SizeReport, ...]

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it early."""
        return any(size.findings.interrupted for size in self.sizes)

    @property
    def succeeded(self) -> bool:
        """Whether no target is missed, and nothing failed."""
        return all(
            all_well(size.verdicts, size.findings.failures, interrupted=size.findings.interrupted)
            for size in self.sizes
        )
