"""Which probes share a server, and servers that do not come up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from loadgen.experiments.capacity.hosting import hosting
from loadgen.load.records import Failure
from loadgen.targets import TargetSpec
from tests.loadgen.experiments.capacity.building import probe

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
