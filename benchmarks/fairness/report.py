"""What is shown and kept of a run."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.fairness.figures import MOST_GROWTH_BYTES, MOST_RATIO, Neighbour, Outcome, Verdict, judge
from benchmarks.fairness.runner import Plan
from benchmarks.record import Run
from loadgen.report.charts import Chart
from loadgen.report.report import Report
from loadgen.report.tables import Row, Table

MIB = 1 << 20
RATIOS = "Ratios"


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessRun(Run):
    """The record of a run. `alone` are the victim's waits beside nobody."""

    plan: Plan
    alone: Neighbour
    neighbours: list[Neighbour]
    outcomes: list[Outcome]
    verdicts: list[Verdict]


def honest_table(alone: Neighbour, neighbours: list[Neighbour]) -> Table:
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
    return Table.of("Honest neighbours", header, rows)


def attack_table(outcomes: list[Outcome], verdicts: list[Verdict]) -> Table:
    """One line an attack."""
    header = (
        "attack",
        "turns",
        "first token p95, ms",
        "first over honest",
        "per token p95, ms",
        "token over honest",
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
    return Table.of("Attacks", header, rows, note.strip())


def report_of(run: FairnessRun, command: tuple[str, ...]) -> Report:
    """What the page of a run says."""
    ratios: list[Row] = [
        {"attack": outcome.name, "of": of, "ratio": ratio}
        for outcome, verdict in zip(run.outcomes, run.verdicts, strict=True)
        for of, ratio in (("first token", verdict.first_ratio), ("time per token", verdict.token_ratio))
    ]
    return Report(
        experiment="fairness",
        title="What one client costs another",
        lead=(
            f"One client of {run.model} takes short turns, again and again, beside another. On {run.place_and_time}.",
            "Each attack is held against honest neighbours for whom the server computed as many tokens in a second.",
        ),
        plan={},
        figures=(),
        tables=(
            attack_table(run.outcomes, run.verdicts),
            honest_table(run.alone, run.neighbours),
            _descriptions(run.outcomes),
            Table(RATIOS, ratios, shown=False),
        ),
        charts=(
            Chart(
                "What attacks cost a victim",
                f"p95 over that beside honest neighbours. Both are to stay below {MOST_RATIO:g}.",
                "bars",
                RATIOS,
                "attack",
                "ratio",
                "of",
                y_label="times as long",
                levels={"at most": MOST_RATIO},
            ),
        ),
        command=command,
        machine=run.machine,
        versions=run.versions,
    )


def _descriptions(outcomes: list[Outcome]) -> Table:
    rows = [
        (each.name, each.description, ", ".join(f"{status}: {count}" for status, count in sorted(each.answers.items())))
        for each in outcomes
    ]
    return Table.of("Attackers", ("attack", "does", "answers"), rows)


def judged(outcomes: list[Outcome], neighbours: list[Neighbour]) -> list[Verdict]:
    """In the same order."""
    return [judge(outcome, neighbours) for outcome in outcomes]
