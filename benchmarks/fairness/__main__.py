"""`python -m benchmarks.fairness`: a victim's waits beside attackers, over those beside honest neighbours."""

import argparse
import sys

from rich.console import Console

from benchmarks.command import bind_to_cores, exit_status, make_parser
from benchmarks.fairness.attacks import ATTACKS
from benchmarks.fairness.figures import Neighbour, Outcome
from benchmarks.fairness.report import FairnessRun, attack_table, honest_table, judged, report_of
from benchmarks.fairness.runner import HONEST, Plan, neighbour_of, outcome_of, play
from benchmarks.record import write_run
from loadgen.options.common import EXIT_FAILED
from loadgen.report.page import write_page, write_pictures
from loadgen.report.tables import to_markdown, to_rich

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
    console.print(to_rich([honest_table(calm, neighbours)]))
    outcomes: list[Outcome] = []
    for number, name in enumerate(plan.attacks):
        with console.status(f"{number + 1} of {len(plan.attacks)}: {name}: {ATTACKS[name].description}"):
            outcomes.append(outcome_of(name, play(arguments.model, name, plan.seconds), alone.turns))
        [verdict] = judged(outcomes[-1:], neighbours)
        word = "kept" if verdict.is_kept else "NOT kept"
        console.print(f"{name}: {word}, {verdict.first_ratio:.2f}× first, {verdict.token_ratio:.2f}× per token")
    run = FairnessRun(
        model=arguments.model.name,
        plan=plan,
        alone=calm,
        neighbours=neighbours,
        outcomes=outcomes,
        verdicts=judged(outcomes, neighbours),
    )
    table = attack_table(outcomes, run.verdicts)
    console.print(to_rich([table]))
    if not arguments.quick:
        heading = f"# What one client costs another: {run.model} on {run.place_and_time}\n"
        text = "\n".join([heading, to_markdown(honest_table(calm, neighbours)), to_markdown(table)])
        path = write_run(arguments.output, "fairness-", run, text)
        page = report_of(run, ("python", "-m", "benchmarks.fairness", *sys.argv[1:]))
        write_page(page, path.with_suffix(".html"))
        write_pictures(page, path.with_suffix(".html"))
        console.print(f"written: {path}")
    return run


if __name__ == "__main__":
    sys.exit(main())
