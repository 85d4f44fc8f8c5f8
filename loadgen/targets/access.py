"""How a target comes to be up while it is measured."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from loadgen.targets.base import TargetSpec


class Access(Protocol):
    """One target that is to be measured, once or several times."""

    @property
    def name(self) -> str:
        """What the target is called in the report."""
        ...

    @property
    def running(self) -> TargetSpec | None:
        """Where the target is if it is up all the while; None if `reach` starts it."""
        ...

    def reach(self) -> AbstractAsyncContextManager[TargetSpec]:
        """A block in which the target is up. Raises `LoadgenError` if it does not come up."""
        ...


@dataclass(frozen=True, slots=True)
class RunningTarget:
    """A server that the load generator neither started nor stops."""

    spec: TargetSpec

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def running(self) -> TargetSpec:
        return self.spec

    @asynccontextmanager
    async def reach(self) -> AsyncIterator[TargetSpec]:
        yield self.spec
