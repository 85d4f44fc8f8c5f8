"""What pausing, restoring and steering cost, and what breakpoints cost those that have none."""

from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.engines import load_layers
from benchmarks.gpu_check.overheads import measure_overheads
from benchmarks.gpu_check.restores import measure_restores


def run(context: StageContext) -> None:
    """Restores first: they take a second."""
    stack = load_layers(context, context.plan.breakpoints.model)
    measure_restores(context, stack)
    measure_overheads(context, stack)
