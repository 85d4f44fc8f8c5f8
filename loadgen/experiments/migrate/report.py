"""What the experiment found."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from loadgen.experiments.migrate.journey import Journey
from loadgen.experiments.migrate.plan import MigratePlan
from loadgen.results.failures import Failure
from loadgen.results.files import Result
from loadgen.results.inputs import Server, Texts


@dataclass(slots=True)
class Findings:
    """What was measured; `failures` say what could not be."""

    journeys: list[Journey] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """Moves of sessions of one length: medians in seconds and bytes, and how many said the same as where they were.

    `first_token_s` is the turn after the import, `move_s` the whole way to its first token, `anew_s` the first token of
    a history as long that had to be computed, `computed_tokens` the most that was computed after a move.
    """

    tokens: int
    moves: int
    equal: int
    same_tokens: int
    decoded_tokens: int
    file_bytes: int
    export_s: float
    import_s: float
    first_token_s: float
    move_s: float
    anew_s: float
    computed_tokens: int

    @property
    def gain(self) -> float:
        """How many times faster it is to move than to compute anew."""
        return self.anew_s / self.move_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateReport(Result):
    """One run of the experiment: sessions went from `origin` to `goal`."""

    experiment: Literal["migrate"] = "migrate"
    plan: MigratePlan
    texts: Texts
    origin: Server
    goal: Server
    findings: Findings
    costs: tuple[Cost, ...]

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it early."""
        return self.findings.interrupted

    @property
    def succeeded(self) -> bool:
        """Whether every session arrived, and said what it would have said where it was."""
        complete = not (self.findings.failures or self.findings.interrupted)
        return complete and all(journey.equal for journey in self.findings.journeys)


def summarize(journeys: Sequence[Journey]) -> tuple[Cost, ...]:
    """One line for each length, the shortest first."""
    lengths = sorted({journey.tokens for journey in journeys})
    return tuple(_cost([journey for journey in journeys if journey.tokens == length]) for length in lengths)


def _cost(alike: Sequence[Journey]) -> Cost:
    def median(of: Callable[[Journey], float]) -> float:
        return statistics.median(map(of, alike))

    return Cost(
        tokens=alike[0].tokens,
        moves=len(alike),
        equal=sum(journey.equal for journey in alike),
        same_tokens=sum(journey.same for journey in alike),
        decoded_tokens=sum(len(journey.stayed.token_ids) for journey in alike),
        file_bytes=alike[0].file_bytes,
        export_s=median(lambda journey: journey.export_s),
        import_s=median(lambda journey: journey.import_s),
        first_token_s=median(lambda journey: journey.moved.seconds),
        move_s=median(lambda journey: journey.move_s),
        anew_s=median(lambda journey: journey.anew.seconds),
        computed_tokens=max(journey.moved.computed_tokens for journey in alike),
    )
