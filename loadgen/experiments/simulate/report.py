"""The result file of the experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadgen.experiments.simulate.measuring.calibrating import Calibration
from loadgen.experiments.simulate.measuring.validating import Validation
from loadgen.experiments.simulate.outcome import Outcome
from loadgen.experiments.simulate.plan import ClusterPlan
from loadgen.load.workload import Workload
from loadgen.results.files import Result
from loadgen.results.inputs import Server
from loadgen.results.origin import Machine
from loadgen.results.verdicts import Outcome as Met
from loadgen.results.verdicts import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateReport(Result):
    """One run of the experiment.

    `calibrated_on` is the machine of the costs, and `server` what was measured there. `plan` holds for every outcome,
    but for its number of replicas. `workload` is for each replica.
    """

    experiment: Literal["simulate"] = "simulate"
    workload: Workload
    plan: ClusterPlan
    calibration: Calibration
    calibrated_on: Machine
    server: Server
    validations: tuple[Validation, ...]
    verdicts: tuple[Verdict, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def interrupted(self) -> bool:
        """Never: a run that is ended early has no report."""
        return False

    @property
    def succeeded(self) -> bool:
        """Whether no simulated figure is further from the measured one than it may be."""
        return all(each.outcome is not Met.MISSED for each in self.verdicts)
