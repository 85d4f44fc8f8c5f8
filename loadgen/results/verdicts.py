"""Figures that are held against targets, whatever the experiment."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadgen.results.failures import Failure
from loadgen.results.tables import Mark, TextTable


class Outcome(StrEnum):
    """Whether a figure is what it should be."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "within the noise"
    UNKNOWN = "not measured"


MARKS = {Outcome.MET.value: Mark.GOOD, Outcome.MISSED.value: Mark.BAD}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure, in words, and the target that it is held against."""

    what: str
    target: str
    measured: str
    outcome: Outcome


def verdict(what: str, target: str, measured: str, met: bool | None) -> Verdict:
    """A verdict; `met` is None for what could not be measured."""
    outcome = Outcome.UNKNOWN if met is None else Outcome.MET if met else Outcome.MISSED
    return Verdict(what, target, measured, outcome)


def verdict_of_spread(what: str, target: str, measured: str, *, met: bool, could_be: bool) -> Verdict:
    """A verdict on a figure that is uncertain: `could_be` if the target is within the bounds of what it may be."""
    outcome = Outcome.MET if met else Outcome.UNDECIDED if could_be else Outcome.MISSED
    return Verdict(what, target, measured, outcome)


def all_well(verdicts: Sequence[Verdict], failures: Sequence[Failure], *, interrupted: bool) -> bool:
    """Whether everything could be measured that the server tells, and no target is missed."""
    missed = any(each.outcome is Outcome.MISSED for each in verdicts)
    return not (missed or failures or interrupted)


def verdict_table(verdicts: Sequence[Verdict]) -> TextTable:
    """Every figure beside its target."""
    rows = [(each.what, each.target, each.measured, each.outcome.value) for each in verdicts]
    return TextTable("Targets", ("", "target", "measured", "outcome"), rows, text_columns=3, marks=MARKS)
