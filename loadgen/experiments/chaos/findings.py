"""What was seen, as it was seen. Times in seconds since the agents began."""

from collections import Counter
from dataclasses import dataclass, field

from loadgen.report.failures import Failure
from loadgen.report.tables import Row


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done to the server. `ended_s` is when it was ready again; `detail` says what came of it."""

    name: str
    began_s: float
    ended_s: float
    detail: str


@dataclass(slots=True)
class Findings:
    """Everything seen. `expected` counts errors while a fault lasted or a session moved, `actions` what agents
    completed, `skipped` says which faults could not be made, and why. `answers` of `tokens` tokens in all were compared
    with the twin's; `wrong` and `unexpected` have a row for each of them that was. `first_s` are times to the first
    token of streamed turns. `samples` say what the server uses.

    Of a cluster: `moved` sessions, `refused` moves by code, `owners` counts sessions by how many replicas have them,
    and `routes` turns by the way that they came to their owners.
    """

    duration_s: float = 0.0
    answers: int = 0
    tokens: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    expected: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    wrong: list[Row] = field(default_factory=list)
    unexpected: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    moved: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    owners: Counter[int] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False
