"""One stage: `python -m benchmarks.gpu_check.child STAGE ...`, in a process of its own.

A fault of a kernel makes CUDA unusable for the rest of a process: of one stage, that way, and not of all.
"""

import argparse
import sys
import time
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_check.context import SkipStage, StageContext
from benchmarks.gpu_check.plan import PLANS, Plan, profiled
from benchmarks.gpu_check.reports.journal import Journal, Outcome
from benchmarks.gpu_check.stage_list import STAGES, Stage


def run_stage(
    stage: Stage, plan: Plan, journal_path: Path, output: Path, budget_s: float, trace: Path | None = None
) -> None:
    """Run the stage on this thread; whatever happens to it is in the journal."""
    with journal_path.open("w", encoding="utf-8") as file:
        journal = Journal(file, has_targets=plan.has_targets)
        missing = [name for name in stage.needs if find_spec(name) is None]
        if missing:
            journal.end(Outcome.SKIPPED, f"not installed: {', '.join(missing)}")
            return
        deadline = time.monotonic() + budget_s
        journal.end(*_outcome(stage, StageContext(plan, journal, deadline, output, trace)))


def _outcome(stage: Stage, context: StageContext) -> tuple[Outcome, str]:
    try:
        import_module(stage.module).run(context)
    except SkipStage as error:
        return Outcome.SKIPPED, str(error)
    except ModuleNotFoundError as error:
        return Outcome.SKIPPED, f"not installed: {error.name}"
    except Exception as error:
        traceback.print_exc()
        return Outcome.FAILED, f"{type(error).__name__}: {error}"
    return Outcome.DONE, ""


def main() -> int:
    """Runs the stage that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=[stage.name for stage in STAGES])
    parser.add_argument("--plan", choices=list(PLANS), required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    stage = next(each for each in STAGES if each.name == options.stage)
    plan = PLANS[options.plan]
    plan = plan if options.trace is None else profiled(plan)
    run_stage(stage, plan, options.journal, options.output, options.budget, options.trace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
