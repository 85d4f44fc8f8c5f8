"""Results that have a report for each of several targets."""

from typing import Protocol

from loadgen.results.inputs import Server


class Findings(Protocol):
    """What was seen of a target."""

    interrupted: bool


class OneTarget(Protocol):
    """What such a result says of one target."""

    @property
    def server(self) -> Server:
        """Which it was."""
        ...

    @property
    def findings(self) -> Findings:
        """What was seen of it."""
        ...

    @property
    def succeeded(self) -> bool:
        """Whether everything was measured, and all was as it should be."""
        ...


class PerTarget:
    """How a result ended that has `targets`: as they did. Stands before `Result` among the bases of its class."""

    __slots__ = ()

    targets: tuple[OneTarget, ...]

    @property
    def interrupted(self) -> bool:
        return any(target.findings.interrupted for target in self.targets)

    @property
    def succeeded(self) -> bool:
        return all(target.succeeded for target in self.targets)
