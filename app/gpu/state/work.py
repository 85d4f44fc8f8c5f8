"""What breakpoints do in a row, in the unit of `STEP_WORK`. Pure."""

from bisect import bisect_right
from collections.abc import Iterable

from app.domain.breakpoint_work import OPERATION_WORK
from app.domain.breakpoints import Intervention
from app.domain.positions import Runs, clip_runs, count
from app.gpu.state.pass_plan import PassPlan, Record


def work_of_way(way: PassPlan) -> int:
    """Positions that edits and captures reach on the way, at least `OPERATION_WORK` for each of them."""
    return _work(_reached(way))


def part_within(most: int, way: PassPlan, first: int, length: int) -> int:
    """How many of the row's `length` tokens from position `first` have at most `most` work on the way; at least 1."""
    reached = list(_reached(way))

    def work(tokens: int) -> int:
        return _work(clip_runs(runs, first, first + tokens) for runs in reached)

    return max(1, bisect_right(range(1, length), most, key=work))


def _reached(way: PassPlan) -> Iterable[Runs]:
    return (step.runs for mark in way.marks for step in mark.steps if isinstance(step, Intervention | Record))


def _work(reached: Iterable[Runs]) -> int:
    return sum(max(OPERATION_WORK, count(runs)) for runs in reached if runs)
