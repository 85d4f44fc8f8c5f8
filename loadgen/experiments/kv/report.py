"""What the experiment found."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from loadgen.experiments.kv.answers import Answers
from loadgen.experiments.kv.codecs import Compression
from loadgen.experiments.kv.copies import Copy, bandwidths
from loadgen.experiments.kv.fp8 import Fp8Error
from loadgen.experiments.kv.links import Link, Loopback
from loadgen.experiments.kv.payoff import Payoff, weigh
from loadgen.experiments.kv.plan import KVPlan
from loadgen.experiments.kv.structure import Growth, Structure, grow
from loadgen.results.failures import Failure
from loadgen.results.files import Result
from loadgen.results.inputs import Server, Texts
from loadgen.results.per_target import PerTarget
from loadgen.results.text import DIRECTIONS

LOOPBACK = "TCP loopback"


@dataclass(slots=True)
class Findings:
    """What was measured on one target; what could not be is None or empty, and `failures` say why."""

    structure: Structure | None = None
    copies: list[Copy] = field(default_factory=list)
    loopback: Loopback | None = None
    compressions: list[Compression] = field(default_factory=list)
    fp8_error: Fp8Error | None = None
    fp8_answers: Answers | None = None
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One target: what was measured, and what follows from it by calculation alone."""

    server: Server
    findings: Findings
    links: tuple[Link, ...]
    growth: tuple[Growth, ...]
    payoffs: tuple[Payoff, ...]

    @property
    def succeeded(self) -> bool:
        """Whether everything was measured, and the server's accounting is that of the file."""
        structure = self.findings.structure
        complete = not (self.findings.failures or self.findings.interrupted)
        return complete and structure is not None and structure.agrees


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReport(PerTarget, Result):
    """One run of the experiment."""

    experiment: Literal["kv"] = "kv"
    plan: KVPlan
    texts: Texts
    targets: tuple[TargetReport, ...]


def conclude(server: Server, nominal: tuple[Link, ...], findings: Findings) -> TargetReport:
    """Calculate what the findings lead to."""
    links = (*sorted(nominal, key=lambda link: link.bytes_per_s), *_measured(findings))
    return TargetReport(
        server,
        findings,
        links,
        growth=() if findings.structure is None else grow(findings.structure),
        payoffs=weigh(links, findings.compressions),
    )


def _measured(findings: Findings) -> Iterator[Link]:
    for direction, speed in bandwidths(findings.copies).items():
        yield Link(DIRECTIONS[direction], speed, measured=True)
    if findings.loopback is not None:
        yield Link(LOOPBACK, findings.loopback.bytes_per_s, measured=True)
