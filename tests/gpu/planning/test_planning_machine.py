"""Random operations on blocks, sequences and the scheduler, against a model of what the KV pool must contain."""

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from app.domain.memory_map import StepCounts, TextUse
from app.domain.values import FinishReason, KVPolicy, SamplingParams, SessionId, StopRule, Ticket, TokenLogprobs
from app.gpu.commands.dispatch import CommandHandler
from app.gpu.commands.transfers import Transfers
from app.gpu.commands.whitebox import Whitebox
from app.gpu.forward.uploads import LoadedUploads
from app.gpu.kernels.linear import DenseLinear
from app.gpu.kv.cache import KVCache
from app.gpu.kv.phases import Phases
from app.gpu.kv.placement import Placement
from app.gpu.kv.tiers import KVTiers
from app.gpu.models.adapters import Adapters
from app.gpu.planning.drafting import Drafting
from app.gpu.planning.queue import Fairness, StepPlan
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns
from app.gpu.sampling import Sampled
from app.gpu.state.blocks import BlockPool
from app.gpu.state.layer_state import ONE_GROUP, Groups
from app.gpu.state.segments import Row
from app.gpu.state.sequence import ActivationRoom
from app.machine.handover import SocketTable
from app.messages import (
    Cancel,
    Close,
    Command,
    Done,
    Event,
    Failed,
    Fork,
    Open,
    PromptScored,
    Rewind,
    Submit,
    Token,
    TurnFinished,
)
from tests.gpu.driving import check_blocks
from tests.gpu.kv.kv_model import KVModel

pytestmark = pytest.mark.timeout(600)  # all examples, however slow the machine

BLOCK_SIZE = 4
MAX_STEP_TOKENS = 7
MAX_RUNNING = 3
tokens = st.builds(lambda shared, own: [0] * shared + [1] * own, st.integers(1, 18), st.integers(0, 3))
"""Prompts that often begin alike, so that sessions share blocks."""


def nobody_asks(*_: object) -> NoReturn:
    raise AssertionError("there is no breakpoint and no grammar in these machines")


class PlanningMachine(RuleBasedStateMachine):
    """Clients open, submit, cancel, fork, rewind and close at random while steps run over a pool that is too small."""

    DEVICE_BLOCKS = 12
    HOST_BLOCKS = 0
    DISK_BLOCKS = 0
    DRAFT_TOKENS = 0
    POLICY = KVPolicy.NONE
    WINDOW: int | None = None
    GROUPS = ONE_GROUP
    MAX_LEN = DEVICE_BLOCKS * BLOCK_SIZE
    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool, self.host = (
            BlockPool(blocks, BLOCK_SIZE, window=self.WINDOW, step_tokens=MAX_STEP_TOKENS, groups=self.GROUPS)
            for blocks in (self.DEVICE_BLOCKS, self.HOST_BLOCKS)
        )
        cache = KVCache(self.pool, self.host)
        tiers = KVTiers(cache, 1, 2)
        self.placement = Placement(tiers, self.POLICY, self.DISK_BLOCKS, lambda: self.now, self.borrow)
        self.tiers = tiers
        drafting = Drafting(cache, max_tokens=self.DRAFT_TOKENS, num_layers=2, max_model_len=self.MAX_LEN)
        self.scheduler = Scheduler(
            self.placement,
            drafting,
            Fairness(prompt_tokens=4, rows=2, prompts_rest=True),
            num_layers=2,
            max_step_tokens=MAX_STEP_TOKENS,
            max_running=MAX_RUNNING,
        )
        self.phases = Phases(self.placement, self.scheduler.headroom)
        activations = ActivationRoom(0)
        self.turns = Turns(self.scheduler, self.MAX_LEN, nobody_asks, activations)
        runner: Any = SimpleNamespace(uploads=LoadedUploads(torch.device("cpu")))
        whitebox = Whitebox(self.placement, runner, nobody_asks, activations, 2)
        self.handler = CommandHandler(
            self.scheduler,
            self.phases,
            self.turns,
            whitebox,
            Transfers(self.placement, self.MAX_LEN, {}, (), SocketTable()),
            Adapters("none here", DenseLinear, torch.device("cpu"), 0),
            text=lambda: TextUse(0, 0),
            steps=StepCounts,
        )
        self.model = KVModel(BLOCK_SIZE, self.WINDOW, self.GROUPS)
        self.tickets = map(Ticket, itertools.count(1))
        self.names = (SessionId(f"s{i}") for i in itertools.count())
        self.histories: dict[SessionId, list[int]] = {}
        self.open_turns: dict[Ticket, SessionId] = {}
        self.scored: set[SessionId] = set()
        """Sessions that have asked for log-probabilities of their prompt, which only computing it again gives."""

    def borrow(self, missing: int) -> int:
        """All weights stay on the device."""
        return 0

    def handle(self, command: Command) -> list[Event]:
        """Raises the error of a command that fails."""
        events = self.handler.handle(command)
        for event in events:
            if isinstance(event, Failed):
                raise event.error
        return events

    def take(self, events: Iterable[Event]) -> None:
        """Follow the events as the event loop would."""
        for event in events:
            match event:
                case Token():
                    self.histories[self.open_turns[event.ticket]].append(event.token_id)
                case PromptScored():
                    history = self.histories[self.open_turns[event.ticket]]
                    assert [scored.token_id for scored in event.logprobs] == history[1:]
                case TurnFinished():
                    session = self.open_turns.pop(event.ticket)
                    assert event.usage.prompt_tokens + event.usage.completion_tokens == event.history_tokens
                    assert 0 <= event.usage.cached_tokens < event.usage.prompt_tokens
                    del self.histories[session][event.history_tokens :]
                case Failed():
                    self.open_turns.pop(event.ticket)

    def ticket_of(self, session: SessionId) -> Ticket | None:
        return next((ticket for ticket, name in self.open_turns.items() if name == session), None)

    @initialize(target=sessions)
    def open_some(self) -> MultipleResults[SessionId]:
        return multiple(*[self.open_for(tenant) for tenant in "aaab"])

    @rule(target=sessions, tenant=st.sampled_from("aab"))
    def open(self, tenant: str) -> SessionId:
        return self.open_for(tenant)

    def open_for(self, tenant: str) -> SessionId:
        session = next(self.names)
        self.handle(Open(next(self.tickets), session, tenant))
        self.histories[session] = []
        return session

    @rule(news=st.lists(st.tuples(sessions, tokens, st.integers(0, 12)), min_size=1, max_size=4))
    def submit_some(self, news: list[tuple[SessionId, list[int], int]]) -> None:
        for session, new, max_tokens in news:
            self.submit(session, new, max_tokens, replace=False, scored=False)

    @rule(session=sessions, new=tokens, max_tokens=st.integers(0, 9), replace=st.booleans(), scored=st.booleans())
    def submit(self, session: SessionId, new: list[int], max_tokens: int, replace: bool, scored: bool) -> None:
        history = self.histories[session]
        wanted = [*new] if replace else history + new
        if self.ticket_of(session) is not None or len(wanted) + min(1, max_tokens) > self.MAX_LEN:
            return
        ticket = next(self.tickets)
        sampling = SamplingParams(seed=0, temperature=0, prompt_logprobs=0 if scored else None)
        stop = StopRule(max_tokens=max_tokens, stop_token_ids=frozenset({3}))
        self.open_turns[ticket] = session
        if scored:
            self.scored.add(session)
        self.take(self.handle(Submit(ticket, session, tuple(new), sampling, stop, replace)))
        self.histories[session] = wanted

    @rule(token=st.sampled_from([0, 0, 1, 2, 3]), count=st.integers(1, 4), follow=st.integers(0, 3))
    def steps(self, token: int, count: int, follow: int) -> None:
        """Engine steps in which every row that samples gets the same token; 3 ends a turn. Up to `follow` more follow
        each before its tokens are accounted for.
        """
        for _ in range(count):
            self.step(token, follow)
            self.every_block_is_accounted_for()

    def step(self, token: int, follow: int = 0) -> None:
        if not self.scheduler.has_work:
            return
        plan = self.scheduler.plan()
        self.placement.write_behind(self.scheduler.queue.running.values())
        # Making room can cost a step, when the sequence that it was for gave way to disk itself; but never two.
        plan = plan if plan.rows or self.tiers.in_flight else self.scheduler.plan()
        assert plan.rows or self.tiers.in_flight, "work waits, yet the step is empty"
        assert len({row.sequence.session for row in plan.rows}) == len(plan.rows), "a sequence has two rows"
        assert sum(row.length for row in plan.rows) <= MAX_STEP_TOKENS
        assert len(plan.rows) <= MAX_RUNNING
        assert [row.length for row in plan.rows] == sorted(row.length for row in plan.rows)
        self.model.run(plan)
        rows = plan.rows
        while rows:
            going_on = follow and not plan.preempted and all(row.sequence.turn is row.turn for row in rows)
            overlapped = self.launch_overlapped(rows, token) if going_on else []
            self.account([row for row in rows if row.sequence.turn is row.turn], token)
            self.every_block_is_accounted_for()
            rows, follow = overlapped, follow - 1

    def launch_overlapped(self, rows: list[Row], token: int) -> list[Row]:
        """Plan and run the rows that follow `rows`, whose token is still on the device."""
        overlapped = self.scheduler.plan_overlapped(rows, self.MAX_LEN).rows
        for row in overlapped:
            row.sequence.tokens.append(token)
        self.model.run(StepPlan(overlapped))
        for row in overlapped:
            row.sequence.tokens.pop()
        return overlapped

    def account(self, rows: list[Row], token: int) -> None:
        for row in rows:
            if row.scores_prompt:
                predicted = row.sequence.tokens[row.first + 1 : row.first + row.length + 1]
                self.take(self.turns.score(row, [TokenLogprobs(token_id, 0.0) for token_id in predicted]))
            self.take(self.turns.advance(row, [Sampled(token, None)] * row.choices))

    @rule(session=sessions, keep=st.none() | st.integers(0, 2))
    def cancel(self, session: SessionId, keep: int | None) -> None:
        ticket = self.ticket_of(session)
        if ticket is None:
            return
        turn = next(s for s in self.handler.sequences if s.session == session).turn
        assert turn is not None
        if keep is not None:
            keep = min(keep, len(self.histories[session]) - turn.prompt_tokens)
        events = self.handle(Cancel(next(self.tickets), session, ticket, keep, FinishReason.STOP))
        self.take(events)
        assert isinstance(events[-1], Done)
        assert events[-1].value == len(self.histories[session])

    @rule(target=sessions, session=sessions, new=tokens)
    def fork(self, session: SessionId, new: list[int]) -> SessionId | MultipleResults[SessionId]:
        """Fork, and let both go on at once."""
        if self.ticket_of(session) is not None:
            return multiple()
        child = next(self.names)
        self.handle(Fork(next(self.tickets), session, child))
        self.histories[child] = list(self.histories[session])
        self.submit_some([(session, [1, *new], 3), (child, [2, *new], 3)])
        return child

    @rule(session=sessions, share=st.floats(0, 1))
    def rewind(self, session: SessionId, share: float) -> None:
        if self.ticket_of(session) is None:
            to_token = int(share * len(self.histories[session]))
            self.handle(Rewind(next(self.tickets), session, to_token))
            del self.histories[session][to_token:]

    @rule(session=consumes(sessions))
    def close(self, session: SessionId) -> None:
        self.take(self.handle(Close(next(self.tickets), session)))
        del self.histories[session]

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        check_blocks(self.scheduler, self.handler.sequences)

    @invariant()
    def a_session_holds_its_window_and_a_block(self) -> None:
        (full, windowed), window = self.GROUPS, self.MAX_LEN if self.WINDOW is None else self.WINDOW
        most = windowed * (-(-window // BLOCK_SIZE) + 1)
        for sequence in self.handler.sequences:
            runs = self.scheduler.queue.runs(sequence)  # a step writes to more, and gives them up when it has ended
            stripes = [len(blocks) // (full + windowed) for blocks in (sequence.blocks, sequence.host_blocks)]
            assert runs or len(sequence.held) <= full * stripes[0] + most
            assert len(sequence.copies) <= full * stripes[1] + most

    @invariant()
    def histories_agree(self) -> None:
        assert {s.session: s.tokens for s in self.handler.sequences} == self.histories

    def teardown(self) -> None:
        """Every turn ends if steps go on, and closed sessions leave nothing behind."""
        for _ in range(3000):
            if not self.open_turns:
                break
            self.step(0)
            self.settle()
        assert not self.open_turns
        for session in list(self.histories):
            self.close(session)
        self.settle()
        assert self.pool.owned == self.host.owned == 0

    def settle(self) -> None:
        """Let everything that moves arrive."""


class DraftingMachine(PlanningMachine):
    """The same with drafts, of which histories like these have many. Without, it runs over lower tiers."""

    DRAFT_TOKENS = 3

    @rule(token=st.sampled_from([0, 1]), session=PlanningMachine.sessions)
    def step_in_a_rut(self, token: int, session: SessionId) -> None:
        """A turn that repeats itself: its drafts are accepted."""
        self.submit(session, [token] * 4, 8, replace=False, scored=False)
        before = self.scheduler.drafting.counts()
        for _ in range(6):
            self.step(token)
            self.every_block_is_accounted_for()
        after = self.scheduler.drafting.counts()
        assert 0 <= after.accepted - before.accepted <= after.drafted - before.drafted


class WindowMachine(DraftingMachine):
    """No layer looks further back than a window, so sessions become longer than the device."""

    DEVICE_BLOCKS = 8
    WINDOW = 6
    GROUPS = Groups(0, 1)
    MAX_LEN = 100
    sessions = PlanningMachine.sessions


class MixedMachine(DraftingMachine):
    """One group of layers sees all tokens, two see a window."""

    DEVICE_BLOCKS = 24
    WINDOW = 6
    GROUPS = Groups(1, 2)
    MAX_LEN = 48
    sessions = PlanningMachine.sessions


TestWindow, TestMixed = WindowMachine.TestCase, MixedMachine.TestCase
TestWindow.settings = TestMixed.settings = settings(stateful_step_count=60)
TestDrafting = DraftingMachine.TestCase
TestDrafting.settings = settings(stateful_step_count=80)
