"""Which probes share a server, and servers that do not come up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from io import StringIO

import pytest
from rich.console import Console

from loadgen.errors import LoadgenError
from loadgen.experiments.capacity.experiment import run_capacity
from loadgen.experiments.capacity.hosting import hosting
from loadgen.experiments.capacity.plan import CapacityPlan
from loadgen.load.corpus import python_topics
from loadgen.load.records import Failure
from loadgen.load.think import Uniform
from loadgen.load.workload import Workload
from loadgen.targets import TargetSpec
from loadgen.targets.access import RunningTarget
from tests.loadgen.experiments.capacity.building import probe
from tests.loadgen.experiments.capacity.stub import CONTEXT, SYSTEM, Stub, serving_stub

PLAN = CapacityPlan(
    Workload(context=CONTEXT, turns=2, completion_tokens=2, system_tokens=SYSTEM, think=Uniform(0.0, 0.0)),
    most=2,
    slo_ttft_s=60.0,
    slo_tpot_s=60.0,
)
WELL = probe(2, 0.1)
SLOW = probe(4, 9.0)
REFUSED = probe(4, 0.1, failures=[Failure(0, 1, 1.0, "RateLimited", "full")])


@dataclass
class Counting:
    """A server that is started for its run, and counts how often."""

    spec: TargetSpec
    name: str = "managed"
    running: None = None
    starts: int = 0
    up: int = 0

    @asynccontextmanager
    async def reach(self) -> AsyncIterator[TargetSpec]:
        self.starts += 1
        self.up += 1
        assert self.up == 1
        yield self.spec
        self.up -= 1


@dataclass
class NeverUp:
    """A server that is started for its run, and does not come up."""

    name: str = "down"
    running: None = None

    def reach(self) -> AbstractAsyncContextManager[TargetSpec]:
        raise LoadgenError("down did not come up")


@pytest.mark.parametrize(("tools", "starts"), [(False, [1, 1, 1, 2]), (True, [1, 2, 3, 4])])
async def test_a_server_is_kept_unless_sessions_may_be_left_on_it(tools: bool, starts: list[int]) -> None:
    target = Counting(TargetSpec("managed", "http://nowhere", "stub", tools=tools))
    seen = []
    async with hosting(target) as host:
        for last in (None, WELL, SLOW, REFUSED):
            assert await host.reach(last) == target.spec
            seen.append(target.starts)
    assert seen == starts
    assert target.up == 0


async def test_a_server_that_does_not_come_up_costs_nothing_of_the_others() -> None:
    with serving_stub(Stub(99)) as address:
        well = RunningTarget(TargetSpec.parse(f"well={address}"))
        found = await run_capacity([well, NeverUp()], PLAN, python_topics(), Console(file=StringIO()))
    first, second = found.targets
    assert (first.findings.held, first.findings.failures) == (2, [])
    assert [failure.message for failure in second.findings.failures] == ["down did not come up"]
    assert not found.succeeded
