"""What every experiment on one Djinn server after the other has in common."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.results.per_target import OneTarget
from loadgen.targets import TargetSpec
from loadgen.targets.subject import Subject

P = TypeVar("P")
R = TypeVar("R", bound=OneTarget)


async def on_each_subject(
    specs: Sequence[TargetSpec],
    prepare: Callable[[Subject], Awaitable[P]],
    measure: Callable[[P], Awaitable[R]],
) -> tuple[R, ...]:
    """Prepare all servers, and then measure each with what came of that, up to one that was interrupted.

    Raises `LoadgenError`, before the first measurement, if one cannot be prepared.
    """
    async with AsyncExitStack() as stack:
        subjects = [Subject(spec) for spec in specs]
        for subject in subjects:
            stack.push_async_callback(subject.close)
        reports: list[R] = []
        for prepared in [await _prepare(subject, prepare) for subject in subjects]:
            reports.append(await measure(prepared))
            if reports[-1].findings.interrupted:
                break
        return tuple(reports)


async def _prepare(subject: Subject, prepare: Callable[[Subject], Awaitable[P]]) -> P:
    try:
        return await prepare(subject)
    except DjinnError as error:
        raise LoadgenError(f"measuring target {subject.spec.name} failed: {error}") from error
