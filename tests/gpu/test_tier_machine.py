"""The planning machine with lower tiers: signals at any time, and moves that end in any order, late, or not at all."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from app.domain import KVPolicy, Phase, SessionId, Tier
from app.gpu.kv_moves import Move, Moved, MoveKind
from app.messages import SetPhase
from tests.gpu.test_planning_machine import PlanningMachine

DISK_KINDS = (MoveKind.TO_DISK, MoveKind.FROM_DISK, MoveKind.DELETE)


class TierMachine(PlanningMachine):
    """Clients also signal; a mover does the copies of its orders at the last moment, when memory may have changed."""

    HOST_BLOCKS = 14
    DISK_BLOCKS = 10
    POLICY = KVPolicy.SIGNAL
    sessions = PlanningMachine.sessions

    def __init__(self) -> None:
        super().__init__()
        self.ordered: list[Move] = []

    def collect(self) -> None:
        self.ordered += self.placement.take_orders()

    def complete(self, move: Move, error: str | None = None) -> None:
        self.ordered.remove(move)
        if error is None:
            self.model.move(move)
        self.take(self.handler.moved(Moved(move.number, 0.001, error)))
        self.collect()

    @rule(session=sessions, phase=st.sampled_from(Phase), resume_in_ms=st.none() | st.floats(0, 2000))
    def signal(self, session: SessionId, phase: Phase, resume_in_ms: float | None) -> None:
        if self.ticket_of(session) is None:
            self.handler.handle(SetPhase(next(self.tickets), session, phase, resume_in_ms))
            self.collect()

    @rule(choice=st.floats(0, 0.999), fails=st.sampled_from([False, False, False, True]))
    def one_move_ends(self, choice: float, fails: bool) -> None:
        """Any move may end next, but the disk does its work in order. Only the disk fails."""
        self.collect()
        first_on_disk = next((move for move in self.ordered if move.kind in DISK_KINDS), None)
        ready = [move for move in self.ordered if move.kind not in DISK_KINDS or move is first_on_disk]
        if ready:
            move = ready[int(choice * len(ready))]
            broken = fails and move.kind in (MoveKind.TO_DISK, MoveKind.FROM_DISK)
            self.complete(move, "the disk is broken" if broken else None)

    @rule(seconds=st.floats(0, 1))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.placement.phases.tick()
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

    def teardown(self) -> None:
        super().teardown()
        assert not self.model.files, "files are left of sessions that are closed"

    @invariant()
    def the_disk_holds_no_more_than_its_budget(self) -> None:
        assert self.placement.lower.disk_used <= self.DISK_BLOCKS


class LruMachine(TierMachine):
    """Nobody's signals count, and KV moves only under pressure."""

    POLICY = KVPolicy.LRU
    DISK_BLOCKS = 0
    sessions = PlanningMachine.sessions


TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=300, stateful_step_count=80, deadline=None)
TestLru = LruMachine.TestCase
TestLru.settings = settings(max_examples=100, stateful_step_count=80, deadline=None)
