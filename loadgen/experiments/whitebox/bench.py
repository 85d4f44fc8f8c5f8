"""A target on the bench: what all parts of the experiment are given."""

from dataclasses import dataclass, field

from loadgen.experiments.whitebox.findings import Findings
from loadgen.experiments.whitebox.plan import WhiteboxPlan
from loadgen.load.prompts import TokenIds
from loadgen.targets.subject import Subject


@dataclass(frozen=True, slots=True)
class Bench:
    """A server that has answered, what will be done to it, and what has been seen of it so far."""

    subject: Subject
    plan: WhiteboxPlan
    layers: tuple[int, ...]
    prompts: tuple[TokenIds, ...]
    findings: Findings = field(default_factory=Findings)

    @property
    def middle_layer(self) -> int:
        """The one layer of the parts that measure speed."""
        return self.layers[len(self.layers) // 2]
