"""Whether a target can be measured, and which of its errors are results."""

from collections.abc import Sequence

from client import ConnectionLost, DjinnError, RateLimited, ServerError, Timeout
from loadgen.errors import LoadgenError
from loadgen.experiments.density.measuring import Plan, connected
from loadgen.targets import TargetSpec
from loadgen.targets.access import Access

ILL = (Timeout, ConnectionLost, ServerError, RateLimited)
"""Errors of a server that is there and not well, which is a result. All others mean that the command is wrong."""


async def check_running(targets: Sequence[Access], plan: Plan) -> None:
    """Raise `LoadgenError` if one of the targets that are up cannot serve the load; a server may be ill."""
    for target in targets:
        if target.running is not None:
            await _check(target.running, plan)


async def _check(spec: TargetSpec, plan: Plan) -> None:
    try:
        async with connected(spec, plan):
            pass
    except ILL:
        return
    except DjinnError as error:
        raise unusable(spec.name, error) from error


def unusable(name: str, error: DjinnError | LoadgenError) -> LoadgenError:
    """The error that ends the command, because the target of that name cannot be measured."""
    if isinstance(error, LoadgenError):
        return error
    return LoadgenError(f"measuring target {name} failed: {error}")
