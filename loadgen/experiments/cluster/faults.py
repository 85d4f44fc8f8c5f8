"""What is done to replicas while agents run."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable

import psutil

from loadgen.errors import NotAsMeant
from loadgen.experiments.cluster.findings import Fault, Findings
from loadgen.experiments.cluster.hosting import POLL_S, Cluster
from loadgen.experiments.cluster.plan import ClusterPlan

GIVE_UP_S = 300.0
"""How long a replica may take to come back. Its keeper waits for up to half a minute before it starts it."""


class Faults:
    """Kills replicas, and tells one to end; waits until each is back before the next."""

    def __init__(
        self,
        cluster: Cluster,
        plan: ClusterPlan,
        findings: Findings,
        clock: Callable[[], float],
        say: Callable[[str], None],
        seed: int,
    ) -> None:
        self._cluster, self._plan, self._findings = cluster, plan, findings
        self._clock, self._say = clock, say
        self._choose = random.Random(f"{seed} faults")
        self._one_at_a_time = asyncio.Lock()

    async def kill(self) -> None:
        """Kill a random replica every so often, until that was done often enough. Raises `NotAsMeant`."""
        if self._plan.kill_every is None:
            return
        number = 0
        while not self._plan.kills or number < self._plan.kills:
            await asyncio.sleep(self._plan.kill_every)
            number += await self._make("kill", signal.SIGKILL)

    async def drain(self) -> None:
        """Tell a random replica to end, once. Raises `NotAsMeant`."""
        if self._plan.drain_at is not None:
            await asyncio.sleep(max(0.0, self._plan.drain_at - self._clock()))
            await self._make("drain", signal.SIGTERM)

    async def over(self) -> None:
        """Wait until the replica that something was done to is back."""
        async with self._one_at_a_time:
            pass

    async def _make(self, kind: str, signal_number: int) -> bool:
        """Send the signal to a replica and wait for its successor. Whether there was a replica."""
        async with self._one_at_a_time:
            running = self._cluster.replicas()
            if not running:
                return False
            name = self._choose.choice(sorted(running))
            began_s, process = self._clock(), running[name]
            try:
                process.send_signal(signal_number)
            except psutil.NoSuchProcess:
                return False
            place = len(self._findings.faults)
            self._findings.faults.append(Fault(kind, name, began_s, None))
            await self._until_back(name, process.pid, began_s)
            self._findings.faults[place] = Fault(kind, name, began_s, self._clock())
            self._say(f"{kind} of replica {name}: back after {self._clock() - began_s:.1f} s")
            return True

    async def _until_back(self, name: str, before: int, began_s: float) -> None:
        while True:
            process = self._cluster.replicas().get(name)
            if process is not None and process.pid != before and await self._cluster.serves(name):
                return
            if self._clock() - began_s > GIVE_UP_S:
                raise NotAsMeant(f"replica {name} did not come back within {GIVE_UP_S:.0f} s")
            await asyncio.sleep(POLL_S)
