"""The planning machine with lower tiers: signals at any time, and moves that end in any order, late, or not at all.

Sessions also leave as files and come back as others, some have been promised that their KV never gives way, and at last
servers end.
"""

import random
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, invariant, multiple, rule

from app.domain.errors import Busy
from app.domain.memory_map import SessionMemory
from app.domain.values import KVPolicy, Phase, Residency, SessionId, Ticket, Tier
from app.gpu.kv.placement import DISK_REST_S
from app.gpu.state.layer_state import Groups
from app.gpu.state.moves import Move, Moved, MoveKind
from app.messages import (
    Done,
    Event,
    Export,
    Failed,
    FreeHost,
    Import,
    KeepKV,
    KeptKV,
    Open,
    Placed,
    SetPhase,
    TurnFinished,
)
from tests.gpu.planning.test_planning_machine import PlanningMachine

pytestmark = pytest.mark.timeout(600)  # all examples, however slow the machine


DISK_KINDS = (MoveKind.TO_DISK, MoveKind.FROM_DISK, MoveKind.DELETE)


class TierMachine(PlanningMachine):
    """Clients also signal; a mover does the copies of its orders at the last moment, when memory may have changed."""

    HOST_BLOCKS = 14
    DISK_BLOCKS = 10
    POLICY = KVPolicy.SIGNAL
    sessions = PlanningMachine.sessions
    paths = Bundle("paths")

    def __init__(self) -> None:
        super().__init__()
        self.ordered: list[Move] = []
        self.files_under_way: set[Ticket] = set()
        self.told: dict[SessionId, SessionMemory] = {}

    def collect(self) -> None:
        self.ordered += self.placement.take_orders()

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Done | Failed) and event.ticket in self.files_under_way:
                self.files_under_way.remove(event.ticket)
            else:
                super().take([event])

    def complete(self, move: Move, error: str | None = None) -> None:
        self.ordered.remove(move)
        report = Moved(move.number, 0.001, error)
        if error is None and move.kind is MoveKind.IMPORT:
            found = self.model.exported[move.path]
            computed = found.computed if self.DISK_BLOCKS else 0
            report = Moved(move.number, 0.001, token_ids=found.token_ids, computed=computed, behind=found.behind)
        if error is None and (self.DISK_BLOCKS or move.kind is not MoveKind.IMPORT):
            self.model.move(move, self.tiers.in_flight[move.number][1].namespace)
        self.take([*self.handler.moved(report), *self.handler.go_on(is_busy=False)])
        self.collect()

    @rule(session=sessions, phase=st.sampled_from(Phase), resume_in_ms=st.none() | st.floats(0, 2000))
    def signal(self, session: SessionId, phase: Phase, resume_in_ms: float | None) -> None:
        if self.ticket_of(session) is None:
            self.handle(SetPhase(next(self.tickets), session, phase, resume_in_ms))
            self.collect()

    @rule(session=sessions)
    def leave_the_host(self, session: SessionId) -> None:
        """Copies of what is on the device go at once."""
        self.handle(FreeHost(next(self.tickets), session))
        [sequence] = [each for each in self.handler.sequences if each.session == session]
        assert not (sequence.blocks and sequence.host_blocks) or sequence.busy or sequence.moving
        self.collect()

    def ready(self) -> list[Move]:
        """Moves that may end next: the disk does its work in order."""
        self.collect()
        first_on_disk = next((move for move in self.ordered if move.kind in DISK_KINDS), None)
        return [move for move in self.ordered if move.kind not in DISK_KINDS or move is first_on_disk]

    @rule(choice=st.floats(0, 0.999), fails=st.sampled_from([False, False, False, True]))
    def one_move_ends(self, choice: float, fails: bool) -> None:
        """Only the disk fails."""
        if ready := self.ready():
            move = ready[int(choice * len(ready))]
            broken = fails and move.kind in (MoveKind.TO_DISK, MoveKind.FROM_DISK, MoveKind.EXPORT)
            self.complete(move, "the disk is broken" if broken else None)

    @rule(target=paths, session=sessions)
    def export(self, session: SessionId) -> str | MultipleResults[str]:
        if self.ticket_of(session) is not None:
            return multiple()
        ticket = next(self.tickets)
        self.files_under_way.add(ticket)
        self.take(self.handle(Export(ticket, session, f"{ticket}.kv")))
        self.collect()
        return f"{ticket}.kv"

    @rule(target=sessions, path=paths)
    def import_(self, path: str) -> SessionId | MultipleResults[SessionId]:
        """It ends at once: until then nobody knows the session. A file that has not been written is an error."""
        session, ticket = next(self.names), next(self.tickets)
        self.files_under_way.add(ticket)
        self.handle(Import(ticket, session, path, namespace=session))
        self.collect()
        [move] = [move for move in self.ordered if move.kind is MoveKind.IMPORT]
        written = self.model.exported.get(path)
        if written is not None:
            self.histories[session] = list(written.token_ids)
        self.complete(move, "there is no such file" if written is None else None)
        return multiple() if written is None else session

    @rule(seconds=st.floats(0, 1))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.phases.tick()
        self.collect()

    @rule()
    def settle(self) -> None:
        self.collect()
        while self.ordered:
            self.complete(self.ordered[0])

    @invariant()
    def copies_are_of_the_right_history(self) -> None:
        self.model.check_copies(self.handler.sequences)

    @invariant()
    def files_are_of_the_right_history(self) -> None:
        self.model.check_files(self.handler.sequences)

    @invariant()
    def kv_is_where_its_tier_says(self) -> None:
        for sequence in self.handler.sequences:
            needed = self.pool.blocks_for(sequence.computed)
            match sequence.tier:
                case Tier.DEVICE:
                    assert len(sequence.blocks) >= needed
                case Tier.HOST | Tier.TO_DEVICE | Tier.TO_DISK:
                    assert not sequence.blocks
                    assert len(sequence.host_blocks) == needed
                case Tier.TO_HOST if not sequence.blocks:
                    assert sequence.incoming is not None
                    assert sequence.incoming.kind is MoveKind.FROM_DISK
                case Tier.DISK:
                    assert sequence.disk_blocks >= self.GROUPS.count_held(needed, sequence.disk_behind)
                    assert sequence.disk_tokens >= sequence.computed
                case None:
                    assert not sequence.computed

    @invariant()
    def clients_are_told_where_kv_is(self) -> None:
        """Of a turn they are told when it ends."""
        for event in self.handler.placed():
            assert isinstance(event, Placed)
            self.told[event.session] = event.memory
        for sequence in (each for each in self.handler.sequences if each.turn is None):
            memory, blocks = self.told[sequence.session], self.placement.tiers.block_bytes
            assert memory.tier is sequence.tier
            assert memory.device_bytes == len(sequence.held) * blocks
            assert memory.host_bytes == len(sequence.copies) * blocks
            assert memory.disk_bytes == sequence.disk_blocks * blocks

    def teardown(self) -> None:
        super().teardown()
        assert not self.model.files, "files are left of sessions that are closed"
        assert not self.files_under_way, "an export or import has not been answered"

    @invariant()
    def the_disk_holds_no_more_than_its_budget(self) -> None:
        used = sum(sequence.disk_blocks for sequence in self.handler.sequences)
        assert used == self.tiers.file_blocks <= self.DISK_BLOCKS

    @invariant()
    def the_tiers_know_who_moves(self) -> None:
        moving = [each for each in self.handler.sequences if each.moving is not None]
        parking = [each for each in moving if each.blocks]
        assert {each.session for each in moving if each not in parking} == set(self.tiers.moving)
        assert all(each.moving is Tier.TO_HOST for each in parking)
        assert self.tiers.saving == sum(len(each.copies) for each in moving if each.moving is Tier.TO_DISK)


class WindowTierMachine(TierMachine):
    """No layer looks further back than a window, so sessions become longer than any tier."""

    DEVICE_BLOCKS = 9
    HOST_BLOCKS = 9
    DISK_BLOCKS = 8
    WINDOW = 6
    GROUPS = Groups(0, 1)
    MAX_LEN = 100
    sessions = PlanningMachine.sessions


class MixedTierMachine(TierMachine):
    """One group of layers sees all tokens, two see a window."""

    DEVICE_BLOCKS = 26
    HOST_BLOCKS = 24
    DISK_BLOCKS = 20
    WINDOW = 6
    GROUPS = Groups(1, 2)
    MAX_LEN = 48
    sessions = PlanningMachine.sessions


class LruMachine(TierMachine):
    """Nobody's signals count, and KV moves only under pressure."""

    POLICY = KVPolicy.LRU
    DISK_BLOCKS = 0
    sessions = PlanningMachine.sessions


class GuaranteedMachine(TierMachine):
    """Some sessions have been promised that their KV never gives way: they compute nothing twice."""

    DEVICE_BLOCKS = 18
    MAX_LEN = 24
    sessions = PlanningMachine.sessions

    def __init__(self) -> None:
        super().__init__()
        self.guaranteed: set[SessionId] = set()
        self.damaged: set[SessionId] = set()
        """Sessions whose file could not be read."""

    @rule(target=sessions)
    def open_guaranteed(self) -> SessionId | MultipleResults[SessionId]:
        contexts = self.DEVICE_BLOCKS // self.pool.blocks_for(self.MAX_LEN)
        refused = sum(sequence.guaranteed for sequence in self.handler.sequences) + 2 > contexts
        session = next(self.names)
        try:
            self.handle(Open(next(self.tickets), session, "a", Residency.GUARANTEED))
        except Busy:
            assert refused
            return multiple()
        assert not refused
        self.guaranteed.add(session)
        self.histories[session] = []
        return session

    def complete(self, move: Move, error: str | None = None) -> None:
        if error is not None and move.kind is MoveKind.FROM_DISK:
            self.damaged.add(move.session)
        super().complete(move, error)

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, TurnFinished):
                promised = self.open_turns[event.ticket] in self.guaranteed - self.damaged - self.scored
                assert not (promised and event.usage.tokens_recomputed)
            super().take([event])

    @invariant()
    def only_its_own_client_sends_it_away(self) -> None:
        """Before its first token is computed, the host may have its prefix: that of another session which is there."""
        for sequence in self.handler.sequences:
            if sequence.guaranteed and sequence.reached:
                assert sequence.tier in (Tier.DEVICE, None) or sequence.waits


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
        self.take(self.handler.go_on(is_busy=False))
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
        self.take(self.handle(KeepKV(next(self.tickets), sessions, within_s=1e9)))
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


TestTiers, TestLru, TestWindow = TierMachine.TestCase, LruMachine.TestCase, WindowTierMachine.TestCase
TestGuaranteed, TestEnding = GuaranteedMachine.TestCase, EndingMachine.TestCase
TestMixed = MixedTierMachine.TestCase
TestMixed.settings = TestTiers.settings = TestLru.settings = TestWindow.settings = TestGuaranteed.settings = settings(
    stateful_step_count=80
)
TestEnding.settings = settings(stateful_step_count=60)

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
            if ready := self.ready():
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


@pytest.mark.parametrize("seed", range(8))
def test_every_turn_ends(seed: int) -> None:
    machine, choose = SmallHost(), random.Random(seed)
    sessions = [machine.open_for("a") for _ in range(SESSIONS)]
    machine.take_turns(sessions, CONTEXT - ANSWER, choose)
    for _ in range(3):
        machine.take_turns(sessions, NEW, choose)
    machine.teardown()
