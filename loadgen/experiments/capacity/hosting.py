"""One server for all probes of a target, or a new one where the last probe left something behind."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from loadgen.experiments.capacity.report import Probe
from loadgen.targets import TargetSpec
from loadgen.targets.access import Access


class Host:
    """The server of one target. It is up from the first `reach` on."""

    def __init__(self, target: Access, stack: AsyncExitStack) -> None:
        self._target = target
        self._stack = stack
        self._spec: TargetSpec | None = None

    async def reach(self, last: Probe | None) -> TargetSpec:
        """The server, with no session on it; `last` is the probe before. Raises `LoadgenError` if it is not up."""
        if self._spec is None or (last is not None and _leaves_something(self._spec, last)):
            await self._stack.aclose()
            self._spec = await self._stack.enter_async_context(self._target.reach())
        return self._spec


def _leaves_something(spec: TargetSpec, last: Probe) -> bool:
    """Whether sessions may still hold KV: agents with tools do not close theirs, and failed turns leave theirs open."""
    return spec.tools or bool(last.run.failures)


@asynccontextmanager
async def hosting(target: Access) -> AsyncIterator[Host]:
    """The server of a target, stopped at the end of the block if the load generator started it."""
    async with AsyncExitStack() as stack:
        yield Host(target, stack)
