"""The table of figures, their targets, and whether these are met."""

from benchmarks.kv.figures import Figure
from benchmarks.tables import TextTable


def figure_table(figures: list[Figure]) -> TextTable:
    """One line a figure: median, spread, target."""
    return TextTable("KV between tiers", ["", "median [spread]", "target", "met"], [_row(figure) for figure in figures])


def _row(figure: Figure) -> list[str]:
    spread, target = figure.spread, figure.target
    value = f"{_number(figure, spread.median)} {figure.unit}"
    if spread.low != spread.high:
        value += f" [{_number(figure, spread.low)}, {_number(figure, spread.high)}]"
    if target is None:
        return [figure.label, value, "", ""]
    sign = "≥" if target.at_least else "≤"
    return [
        figure.label,
        value,
        f"{sign} {target.bound:g} {figure.unit}",
        "yes" if target.is_met(spread.median) else "no",
    ]


def _number(figure: Figure, value: float) -> str:
    return f"{value:.3f}" if figure.unit == "×" or value < 1 else f"{value:.2f}"
