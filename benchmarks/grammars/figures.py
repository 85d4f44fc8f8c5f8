"""From the raw record to figures, each with its target. Pure."""

from benchmarks.figures import Figure, Target
from benchmarks.grammars.plan import WIDTHS
from benchmarks.grammars.runner import Measured
from benchmarks.spread import middle_half

HELD = Target(1.05)


def figures_of(measured: Measured) -> list[Figure]:
    """The whole table. Ratios are taken within a round, before the median over rounds."""
    figures = []
    for width in WIDTHS:
        rounds = [entry for entry in measured.rounds if entry.width == width]
        name = "1 session" if width == 1 else f"{width} sessions"
        figures += [
            Figure(f"Decode step, {name}", "ms", middle_half([entry.free_s * 1e3 for entry in rounds])),
            Figure(f"Decode step, {name}, each with a schema", "ms", middle_half([e.held_s * 1e3 for e in rounds])),
            Figure(
                f"Step with schemas / without, {name}", "×", middle_half([e.held_s / e.free_s for e in rounds]), HELD
            ),
        ]
    return figures
