"""Turns of many sessions whose KV lives on disk, on a host that holds hardly more than two of them."""

from __future__ import annotations

import random

import pytest

from app.domain.values import Phase, SessionId
from tests.gpu.kv_tiers.test_tier_machine import DISK_KINDS, TierMachine

SESSIONS, CONTEXT, NEW, ANSWER = 6, 28, 3, 4
LOOKS = 400
"""So often may the engine look at its queue until all have had a turn; tens are enough."""


class SmallHost(TierMachine):
    """Some of the moves under way have ended by the time of the next look."""

    DEVICE_BLOCKS = 16
    HOST_BLOCKS = 16
    DISK_BLOCKS = 200
    MAX_LEN = DEVICE_BLOCKS * 4

    def look(self, choose: random.Random) -> None:
        if self.scheduler.has_work:
            plan = self.scheduler.plan()
            self.collect()
            self.model.run(plan)
            self.account(plan.rows, token=0)
        self.phases.tick()
        for _ in range(choose.randint(0, 3)):
            self.move_one(choose)

    def move_one(self, choose: random.Random) -> None:
        self.collect()
        first_on_disk = next((move for move in self.ordered if move.kind in DISK_KINDS), None)
        ready = [move for move in self.ordered if move.kind not in DISK_KINDS or move is first_on_disk]
        if ready:
            self.complete(choose.choice(ready))

    def take_turns(self, sessions: list[SessionId], new: int, choose: random.Random) -> None:
        """All at once."""
        for session in sessions:
            self.submit(session, [choose.randint(10, 99) for _ in range(new)], ANSWER, replace=False, scored=False)
        for _ in range(LOOKS):
            if not self.open_turns:
                return
            self.look(choose)
        raise AssertionError(f"{len(self.open_turns)} turns have not ended, and KV moves to disk and back")

    def send_to_disk(self, sessions: list[SessionId]) -> None:
        for session in sessions:
            self.signal(session, Phase.IDLE, None)
            self.settle()


@pytest.mark.parametrize("seed", range(20))
def test_every_turn_ends(seed: int) -> None:
    machine, choose = SmallHost(), random.Random(seed)
    sessions = [machine._open("a") for _ in range(SESSIONS)]
    machine.take_turns(sessions, CONTEXT - ANSWER, choose)
    for _ in range(3):
        machine.take_turns(sessions, NEW, choose)
    machine.teardown()


class WideDevice(SmallHost):
    """Of two contexts that come from disk at once, the second waits until the first has left the host."""

    DEVICE_BLOCKS = 60
    HOST_BLOCKS = 10


@pytest.mark.parametrize("seed", range(20))
def test_kv_on_disk_is_not_lost_as_others_load_first(seed: int) -> None:
    machine, choose = WideDevice(), random.Random(seed)
    sessions = [machine._open("a") for _ in range(SESSIONS)]
    for session in sessions:
        machine.take_turns([session], CONTEXT - ANSWER, choose)
        machine.send_to_disk([session])
    machine.take_turns(sessions, NEW, choose)
    assert machine.placement.lower.dropped == 0
