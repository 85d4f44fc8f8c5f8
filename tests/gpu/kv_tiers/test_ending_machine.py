"""The machine of tiers, whose server ends at last: all KV is in files then, whatever was under way."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings

from app.gpu.kv_tiers.lower import DISK_REST_S
from app.messages import Done, Event, KeepKV, KeptKV
from tests.examples import examples
from tests.gpu.kv_tiers.test_tier_machine import TierMachine
from tests.gpu.planning.test_planning_machine import PlanningMachine

pytestmark = [pytest.mark.examples, pytest.mark.timeout(600)]


class EndingMachine(TierMachine):
    """The disk has room for all. The host has less than the device, and room for the longest context."""

    DEVICE_BLOCKS = 18
    MAX_LEN = 24
    HOST_BLOCKS = 8
    DISK_BLOCKS = 2000
    sessions = PlanningMachine.sessions

    def __init__(self) -> None:
        super().__init__()
        self.kept: KeptKV | None = None

    def collect(self) -> None:
        self.take(self.handler.keeper.tick())
        super().collect()

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Done) and isinstance(event.value, KeptKV):
                self.kept = event.value
            else:
                super().take([event])

    def teardown(self) -> None:
        sessions = tuple(sequence.session for sequence in self.handler.sequences)
        self.now += 2 * DISK_REST_S  # a write that has failed is forgotten
        self.handler.handle(KeepKV(next(self.tickets), sessions, within_s=1e9))
        for _ in range(5000):
            if self.open_turns:
                self.step(0)
            self.collect()
            if self.ordered:
                self.complete(self.ordered[0])
            if self.kept is not None and not self.open_turns:
                break
        assert self.kept is not None
        with_kv = [sequence for sequence in self.handler.sequences if sequence.computed]
        assert all(sequence.disk_tokens >= sequence.computed for sequence in with_kv)
        tokens = sum(sequence.computed for sequence in with_kv)
        assert self.kept == KeptKV(len(with_kv), tokens, lost=0, lost_tokens=0)
        self.model.check_files(with_kv)
        super().teardown()


TestEnding = EndingMachine.TestCase
TestEnding.settings = settings(max_examples=examples(200), stateful_step_count=60)
