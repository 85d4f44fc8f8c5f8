"""What is shown and kept of a run."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes

from benchmarks.fairness.figures import MOST_GROWTH_BYTES, MOST_RATIO, Neighbour, Outcome, Verdict, judge
from benchmarks.fairness.runner import Plan
from benchmarks.record import Run
from loadgen.results.figures import Figure, color_of
from loadgen.results.page import Page, Section
from loadgen.results.tables import Mark, TextTable

MARKS = {"yes": Mark.GOOD, "no": Mark.BAD}
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessRun(Run):
    """The record of a run. `alone` are the victim's waits beside nobody."""

    plan: Plan
    alone: Neighbour
    neighbours: list[Neighbour]
    outcomes: list[Outcome]
    verdicts: list[Verdict]


def honest_table(alone: Neighbour, neighbours: list[Neighbour]) -> TextTable:
    """The victim's waits beside those who do no harm."""
    rows = [
        (
            "nobody" if each.count == 0 else f"{each.count} honest",
            f"{each.tokens_per_s:.0f}",
            f"{each.waits.first_s * 1000:.0f}",
            f"{each.waits.token_s * 1000:.1f}",
        )
        for each in (alone, *neighbours)
    ]
    header = ("beside", "their tokens/s", "first token p95, ms", "time per token p95, ms")
    return TextTable("Honest neighbours", header, rows)


def attack_table(outcomes: list[Outcome], verdicts: list[Verdict]) -> TextTable:
    """One line an attack."""
    header = (
        "attack",
        "turns",
        "first token p95, ms",
        "over honest",
        "per token p95, ms",
        "over honest",
        "MiB",
        "kept",
    )
    rows = [
        (
            outcome.name,
            str(outcome.turns),
            f"{outcome.waits.first_s * 1000:.0f}",
            f"{verdict.first_ratio:.2f}×",
            f"{outcome.waits.token_s * 1000:.1f}",
            f"{verdict.token_ratio:.2f}×",
            f"{outcome.grown_bytes / MIB:.0f}",
            "yes" if verdict.is_kept else "no",
        )
        for outcome, verdict in zip(outcomes, verdicts, strict=True)
    ]
    bad = [
        f"{each.name}: {each.error or f'{each.wrong} turns with other tokens'}"
        for each in outcomes
        if each.error or each.wrong
    ]
    note = (
        f"Kept: both ratios at most {MOST_RATIO:g}, at most {MOST_GROWTH_BYTES / MIB:.0f} MiB beyond the budgets, the "
        "same tokens, and a server that is ready. " + " ".join(bad)
    )
    return TextTable("Attacks", header, rows, note=note.strip(), marks=MARKS)


def page_of(run: FairnessRun, command: tuple[str, ...]) -> Page:
    """The page of a run."""

    def draw(axes: Axes) -> None:
        names = [each.name for each in run.outcomes]
        places = range(len(names))
        for number, (label, values) in enumerate(
            (
                ("first token", [each.first_ratio for each in run.verdicts]),
                ("time per token", [each.token_ratio for each in run.verdicts]),
            )
        ):
            axes.plot(values, places, "o", color=color_of(number), label=label)
        axes.axvline(MOST_RATIO, linestyle="--", color=color_of(3))
        axes.set_yticks(list(places), names, fontsize=6)
        axes.invert_yaxis()
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.set_xlabel("p95 over that beside honest neighbours")

    figure = Figure(
        "What attacks cost a victim",
        f"Both are to stay left of the dashed line, at {MOST_RATIO:g}.",
        draw,
    )
    lead = (
        f"One client of {run.model} takes short turns, again and again, beside another. On {run.place_and_time}.",
        "Each attack is held against honest neighbours for whom the server computed as many tokens in a second.",
    )
    sections = (
        Section("Attacks", "", (figure,), (attack_table(run.outcomes, run.verdicts),)),
        Section("Honest neighbours", "", (), (honest_table(run.alone, run.neighbours),)),
        Section("What each attacker does", "", (), (_descriptions(run.outcomes),)),
    )
    return Page("What one client costs another", lead, sections, command)


def _descriptions(outcomes: list[Outcome]) -> TextTable:
    rows = [
        (each.name, each.description, ", ".join(f"{status}: {count}" for status, count in sorted(each.answers.items())))
        for each in outcomes
    ]
    return TextTable("Attackers", ("attack", "does", "answers"), rows, text_columns=3)


def judged(outcomes: list[Outcome], neighbours: list[Neighbour]) -> list[Verdict]:
    """In the same order."""
    return [judge(outcome, neighbours) for outcome in outcomes]
