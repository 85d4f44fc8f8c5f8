"""An operator who moves sessions from replica to replica."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from pydantic import BaseModel

from client.calls import Call
from client.errors import DjinnError
from client.transport import AsyncTransport
from loadgen.experiments.cluster.agent import ClusterAgents
from loadgen.experiments.cluster.findings import Findings, Move
from loadgen.experiments.cluster.retrying import code_of

UNSETTLED_AT_ONCE = 8
"""Moves under way at most: one that hangs does not end the others."""


class Moved(BaseModel):
    """What the server answers."""

    tokens: int
    tokens_with_kv: int
    bytes: int
    seconds: float
    replica: str


class Mover:
    """Moves random sessions of agents that rest, to random other replicas."""

    def __init__(
        self,
        transport: AsyncTransport,
        agents: ClusterAgents,
        names: Sequence[str],
        findings: Findings,
        clock: Callable[[], float],
        seed: int,
    ) -> None:
        self._transport, self._agents, self._names = transport, agents, names
        self._findings, self._clock = findings, clock
        self._choose = random.Random(f"{seed} moves")
        self._places: dict[str, str] = {}
        """Where sessions have been moved to; the others are where their ids say."""

    async def run(self, per_second: float) -> None:
        """Begin so many moves a second, until cancelled."""
        began, number = self._clock(), 0
        async with asyncio.TaskGroup() as group:
            under_way: set[asyncio.Task[None]] = set()
            while True:
                number += 1
                await asyncio.sleep(max(0.0, began + number / per_second - self._clock()))
                resting = [agent.session.id for agent in self._agents.every if agent.rests and agent.session]
                if resting and len(under_way) < UNSETTLED_AT_ONCE:
                    task = group.create_task(self._move(self._choose.choice(resting)))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)

    async def _move(self, session: str) -> None:
        here = self._places.get(session) or session.split("_")[1]
        there = self._choose.choice([name for name in self._names if name != here])
        began_s = self._clock()
        try:
            moved = await self._transport.send(move_call(session, there))
        except DjinnError as error:
            self._findings.refused[code_of(error)] += 1
            if code_of(error) == "already_there":  # an earlier move whose answer was lost
                self._places[session] = there
            return
        self._places[session] = moved.replica
        self._findings.moves.append(Move(began_s, moved.seconds, moved.bytes, moved.tokens, moved.tokens_with_kv))


def move_call(session: str, replica: str) -> Call[Moved]:
    """`POST /v1/sessions/{id}/move`."""
    return Call("POST", f"/v1/sessions/{session}/move", Moved.model_validate_json, json={"replica": replica})
