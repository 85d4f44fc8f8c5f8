"""`python -m benchmarks.fairness`: a victim's waits beside attackers, over those beside honest neighbours."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from rich.console import Console

from benchmarks.command import bind_to_cores, exit_status, make_parser
from benchmarks.fairness.attacks import ATTACKS
from benchmarks.fairness.runner import (
    HONEST,
    MOST_GROWTH_BYTES,
    MOST_RATIO,
    Neighbour,
    Outcome,
    Plan,
    Verdict,
    judge,
    neighbour_of,
    outcome_of,
    play,
)
from benchmarks.record import Run, write_run
from loadgen.options.common import EXIT_FAILED
from loadgen.report.tables import Row, Table, to_markdown, to_rich

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessRun(Run):
    """The record of a run. `alone` are the victim's waits beside nobody."""

    plan: Plan
    alone: Neighbour
    neighbours: list[Neighbour]
    outcomes: list[Outcome]
    verdicts: list[Verdict]


def tables_of(run: FairnessRun) -> list[Table]:
    """The victim's waits beside those who do no harm, one line an attack, and what attackers did."""
    honest: list[Row] = [
        {
            "beside": f"{each.count} honest" if each.count else "nobody",
            "their tokens/s": round(each.tokens_per_s),
            "first token p95, ms": round(1000 * each.waits.first_s),
            "time per token p95, ms": 1000 * each.waits.token_s,
        }
        for each in (run.alone, *run.neighbours)
    ]
    attacks: list[Row] = [
        {
            "attack": outcome.name,
            "turns": outcome.turns,
            "first token p95, ms": round(1000 * outcome.waits.first_s),
            "first over honest": f"{verdict.first_ratio:.2f}×",
            "per token p95, ms": 1000 * outcome.waits.token_s,
            "token over honest": f"{verdict.token_ratio:.2f}×",
            "MiB": round(outcome.grown_bytes / MIB),
            "kept": verdict.is_kept,
        }
        for outcome, verdict in zip(run.outcomes, run.verdicts, strict=True)
    ]
    did: list[Row] = [
        {
            "attack": each.name,
            "does": each.description,
            "answers": ", ".join(f"{status}: {count}" for status, count in sorted(each.answers.items())),
            "what went wrong": each.error or (f"{each.wrong} turns with other tokens" if each.wrong else None),
        }
        for each in run.outcomes
    ]
    note = (
        f"Kept: both ratios at most {MOST_RATIO:g}, at most {MOST_GROWTH_BYTES / MIB:.0f} MiB beyond the budgets, the "
        "same tokens, and a server that is ready."
    )
    return [Table("Attacks", attacks, note), Table("Honest neighbours", honest), Table("Attackers", did)]


SECONDS, QUICK_SECONDS = 30.0, 3.0
QUICK = ("long-prompts", "phase-flips", "half-headers")


def main() -> int:
    """Run it as the command line asks; returns the process's exit status: 1 also where an attack does too much harm."""
    parser = make_parser("python -m benchmarks.fairness", __doc__)
    parser.add_argument("--attacks", help=f"comma-separated, of {', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"beside each neighbour; default {SECONDS:g}")
    arguments = parser.parse_args()
    names = tuple(arguments.attacks.split(",")) if arguments.attacks else tuple(ATTACKS)
    unknown = [name for name in names if name not in ATTACKS]
    if unknown:
        parser.error(f"--attacks: no attack {', '.join(unknown)}; there are {', '.join(ATTACKS)}")
    plan = Plan(QUICK_SECONDS, QUICK) if arguments.quick else Plan(arguments.seconds, names)
    runs: list[FairnessRun] = []
    status = exit_status(arguments.model, lambda: runs.append(_run(arguments, plan, Console())))
    return status or (0 if all(verdict.is_kept for run in runs for verdict in run.verdicts) else EXIT_FAILED)


def _run(arguments: argparse.Namespace, plan: Plan, console: Console) -> FairnessRun:
    bind_to_cores(arguments.cores)
    with console.status("beside nobody"):
        alone = play(arguments.model, None, plan.seconds)
    neighbours: list[Neighbour] = []
    for count in HONEST:
        with console.status(f"beside {count} honest neighbours"):
            scene = play(arguments.model, f"honest-{count}", plan.seconds)
        neighbours.append(neighbour_of(f"{count} honest neighbours", count, scene))
    calm = Neighbour(0, 0.0, alone.waits)
    outcomes: list[Outcome] = []
    for number, name in enumerate(plan.attacks):
        with console.status(f"{number + 1} of {len(plan.attacks)}: {name}: {ATTACKS[name].description}"):
            outcomes.append(outcome_of(name, play(arguments.model, name, plan.seconds), alone.turns))
        verdict = judge(outcomes[-1], neighbours)
        word = "kept" if verdict.is_kept else "NOT kept"
        console.print(f"{name}: {word}, {verdict.first_ratio:.2f}× first, {verdict.token_ratio:.2f}× per token")
    run = FairnessRun(
        model=arguments.model.name,
        plan=plan,
        alone=calm,
        neighbours=neighbours,
        outcomes=outcomes,
        verdicts=[judge(each, neighbours) for each in outcomes],
    )
    tables = tables_of(run)
    console.print(to_rich(tables))
    if not arguments.quick:
        heading = f"# What one client costs another: {run.model} on {run.place_and_time}\n"
        text = "\n".join([heading, *map(to_markdown, tables)])
        path = write_run(arguments.output, "fairness-", run, text)
        console.print(f"written: {path}")
    return run


if __name__ == "__main__":
    sys.exit(main())
