"""Figures, the targets that they are held against, and the table of both. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from loadgen.results.spread import Spread
from loadgen.results.tables import Mark, TextTable

MARKS = {"yes": Mark.GOOD, "no": Mark.BAD}


@dataclass(frozen=True, slots=True)
class Target:
    """The bound that a median has to keep, itself included."""

    bound: float
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        """Whether `value` is on the right side of the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `unit` is `×` for a ratio; `target` is None for what is only reported."""

    label: str
    unit: str
    spread: Spread
    target: Target | None = None


def figure_table(title: str, figures: Iterable[Figure]) -> TextTable:
    """One line a figure: median, spread, target, and whether it is met."""
    return TextTable(title, ("", "median [spread]", "target", "met"), [_row(figure) for figure in figures], marks=MARKS)


def _row(figure: Figure) -> tuple[str, ...]:
    spread, target = figure.spread, figure.target
    value = f"{_number(figure, spread.median)} {figure.unit}"
    if spread.low != spread.high:
        value += f" [{_number(figure, spread.low)}, {_number(figure, spread.high)}]"
    if target is None:
        return (figure.label, value, "", "")
    sign = "≥" if target.at_least else "≤"
    met = "yes" if target.is_met(spread.median) else "no"
    return (figure.label, value, f"{sign} {target.bound:g} {figure.unit}", met)


def _number(figure: Figure, value: float) -> str:
    return f"{value:.3f}" if figure.unit == "×" or value < 1 else f"{value:.2f}"
