"""The planning machine with lower tiers: signals at any time, and moves that end in any order, late, or not at all.

Sessions also leave as files and come back as others, and some have been promised that their KV never gives way.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, invariant, multiple, rule

from app.domain.errors import Busy
from app.domain.memory_map import SessionMemory
from app.domain.values import KVPolicy, Phase, Residency, SessionId, Ticket, Tier
from app.gpu.kv.moves import Move, Moved, MoveKind
from app.messages import Done, Event, Export, Failed, FreeHost, Import, Open, Placed, SetPhase, TurnFinished
from tests.examples import examples
from tests.gpu.planning.test_planning_machine import PlanningMachine

pytestmark = [pytest.mark.examples, pytest.mark.timeout(600)]  # hundreds of examples, however slow the machine

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
            report = Moved(move.number, 0.001, token_ids=found.token_ids, computed=computed)
        if error is None and (self.DISK_BLOCKS or move.kind is not MoveKind.IMPORT):
            self.model.move(move, self.ledger.find(move.number)[1].namespace)
        self.take(self.handler.moved(report))
        self.collect()

    @rule(session=sessions, phase=st.sampled_from(Phase), resume_in_ms=st.none() | st.floats(0, 2000))
    def signal(self, session: SessionId, phase: Phase, resume_in_ms: float | None) -> None:
        if self.ticket_of(session) is None:
            self.handler.handle(SetPhase(next(self.tickets), session, phase, resume_in_ms))
            self.collect()

    @rule(session=sessions)
    def leave_the_host(self, session: SessionId) -> None:
        self.handler.handle(FreeHost(next(self.tickets), session))
        self.collect()

    @rule(choice=st.floats(0, 0.999), fails=st.sampled_from([False, False, False, True]))
    def one_move_ends(self, choice: float, fails: bool) -> None:
        """Any move may end next, but the disk does its work in order. Only the disk fails."""
        self.collect()
        first_on_disk = next((move for move in self.ordered if move.kind in DISK_KINDS), None)
        ready = [move for move in self.ordered if move.kind not in DISK_KINDS or move is first_on_disk]
        if ready:
            move = ready[int(choice * len(ready))]
            broken = fails and move.kind in (MoveKind.TO_DISK, MoveKind.FROM_DISK, MoveKind.EXPORT)
            self.complete(move, "the disk is broken" if broken else None)

    @rule(target=paths, session=sessions)
    def export(self, session: SessionId) -> str | MultipleResults[str]:
        if self.ticket_of(session) is not None:
            return multiple()
        ticket = next(self.tickets)
        self.files_under_way.add(ticket)
        self.take(self.handler.handle(Export(ticket, session, f"{ticket}.kv")))
        self.collect()
        return f"{ticket}.kv"

    @rule(target=sessions, path=paths)
    def import_(self, path: str) -> SessionId | MultipleResults[SessionId]:
        """It ends at once: until then nobody knows the session. A file that has not been written is an error."""
        session, ticket = next(self.names), next(self.tickets)
        self.files_under_way.add(ticket)
        self.handler.handle(Import(ticket, session, path, namespace=session))
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
        """Let everything that moves arrive."""
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
                    assert sequence.disk_blocks >= needed
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
            assert memory.device_bytes == len(sequence.blocks) * blocks
            assert memory.host_bytes == len(sequence.host_blocks) * blocks
            assert memory.disk_bytes == sequence.disk_blocks * blocks

    def teardown(self) -> None:
        super().teardown()
        assert not self.model.files, "files are left of sessions that are closed"
        assert not self.files_under_way, "an export or import has not been answered"

    @invariant()
    def the_disk_holds_no_more_than_its_budget(self) -> None:
        used = sum(sequence.disk_blocks for sequence in self.handler.sequences)
        assert used == self.placement.lower.disk_used <= self.DISK_BLOCKS


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
            self.handler.handle(Open(next(self.tickets), session, "a", Residency.GUARANTEED))
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


TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=examples(300), stateful_step_count=80)
TestLru = LruMachine.TestCase
TestLru.settings = settings(max_examples=examples(100), stateful_step_count=80)
TestGuaranteed = GuaranteedMachine.TestCase
TestGuaranteed.settings = settings(max_examples=examples(100), stateful_step_count=80)
