"""Random clients that pause, edit, fork, park, cancel and close: tokens are those of a replay that never pauses."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from app.domain.breakpoints import ALL, NEXT_BREAKPOINT, Action, Breakpoint, Edit, EditOp, Pass, Positions, Until, When
from app.domain.values import KVPolicy, Phase, Residency, SamplingParams, SessionId
from app.gpu.engine import Engine
from app.gpu.forward.graphs import KeptGraphs
from app.messages import Export, Import, Open, PublishKV, ReceiveKV, Rewind, SendKV, SetPhase
from tests.gpu.breakpoints.breaking import Turn
from tests.gpu.breakpoints.breaking_models import BLOCK, VOCAB, TinyModel, make_tiny
from tests.gpu.breakpoints.breaking_oracle import change_of, hooked, within
from tests.gpu.driving import tcp_pair
from tests.gpu.forward.recording import FakeRecorder, PaddedAttention, with_attention
from tests.gpu.planning.test_drafting import drive

# Hypothesis runs all examples, however slow the machine.
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

LAYERS = 2
MAX_HISTORY = 36
prompts = st.builds(lambda shared, own: [5] * shared + [6] * own, st.integers(1, 11), st.integers(0, 3))
"""They often begin alike, so that sessions share blocks. Answers lean to their token, so some drafts are right."""
BIASED, BIAS = SamplingParams(seed=0, temperature=0, logit_bias={5: 2.5}), 2.5 * (torch.arange(VOCAB) == 5)
shares = st.floats(0, 0.999)
factors = st.sampled_from([-1.0, 0.5, 2.0])
LONG_PROMPT = [5] * 11
AFTER_PREFIX = When(Pass.PREFILL, position=9)
places = st.builds(When, st.sampled_from([Pass.PREFILL, Pass.ANY]), position=st.integers(2, 14) | st.just(MAX_HISTORY))
"""They leave the beginning of a context to be found in the cache, and where no token stands, drafts to be made."""
conditions = st.one_of(
    st.sampled_from([When(), When(Pass.PREFILL), When(Pass.DECODE), When(every=3), When(Pass.PREFILL, token_id=6)]),
    places,
)
ways_on = st.sampled_from([NEXT_BREAKPOINT, NEXT_BREAKPOINT, Until(next_token=True), Until(end=True)])


T = TypeVar("T")
Made = tuple[int, float, int, int]
"""The layer, the factor, and the positions that were scaled by it."""


def pick(found: list[T], share: float) -> T:
    """One of a list, whatever its length."""
    return found[int(share * len(found))]


@cache
def tiny(shape: str) -> TinyModel:
    with tempfile.TemporaryDirectory() as folder:
        return make_tiny(shape, Path(folder))


@cache
@torch.no_grad()
def next_token(shape: str, history: tuple[int, ...], made: tuple[Made, ...]) -> int:
    """What Transformers says after `history`, every position of which is computed at once. Biased as turns are."""
    changes = [change_of(layer, Edit(EditOp.SCALE, factor), within(first, end)) for layer, factor, first, end in made]
    with hooked(tiny(shape).oracle, changes):
        return int((tiny(shape).oracle(input_ids=torch.tensor([history])).logits[0, -1] + BIAS).argmax())


@dataclass(eq=False)
class Client:
    """What a session is expected to have: all of its history but for the tokens of a turn that has not ended."""

    session: SessionId
    shape: str
    steering: tuple[Made, ...] = ()
    """What is done to all positions from now on. Once it is disarmed, it is among what has been `made`."""
    history: list[int] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    turn: Turn | None = None
    computed: int | None = 0
    """Positions that have had their KV since the history was last cut; None after a cancel: nobody knows."""

    def unmake(self, first: int) -> None:
        """Forget what was made of positions from `first` on: they are gone, or will be computed anew."""
        self.made = [(*made[:3], min(made[3], first)) for made in self.made if made[2] < first]

    def replay(self, count: int) -> Iterator[int]:
        history = list(self.history)
        for _ in range(count):
            history.append(next_token(self.shape, tuple(history), (*self.steering, *self.made)))
            yield history[-1]


class BreakpointMachine(RuleBasedStateMachine):
    """Without lower tiers: what gives way is recomputed."""

    SHAPE = "two-layers"
    DEVICE_BLOCKS = 13
    HOST_BLOCKS = 0
    POLICY = KVPolicy.NONE

    def __init__(self) -> None:
        super().__init__()
        self.driver = drive(self.engine())
        self.clients: list[Client] = []

    def model(self) -> TinyModel:
        """What the engine runs."""
        return tiny(self.SHAPE)

    def engine(self, **changed: Any) -> Engine:
        blocks: dict[str, Any] = {"blocks": self.DEVICE_BLOCKS, "host_blocks": self.HOST_BLOCKS}
        return self.model().engine(max_step_tokens=7, policy=self.POLICY, **blocks, **changed)

    def idle(self) -> list[Client]:
        return [client for client in self.clients if client.turn is None]

    def paused(self) -> list[tuple[Client, Turn]]:
        return [(client, client.turn) for client in self.clients if client.turn is not None and client.turn.paused]

    @initialize(primed=st.booleans())
    def open_some(self, primed: bool) -> None:
        """Two of them find what the one before them has computed with the same steering, and pause after it."""
        for when in (When(), When(Pass.DECODE), When(position=MAX_HISTORY)):
            self.open(None, when)
        for when in (When(position=MAX_HISTORY), AFTER_PREFIX, AFTER_PREFIX):
            self.open((0, -1.0), when)
            if primed:
                self.begin(self.clients[-1], LONG_PROMPT, 3)
                self.steps(4, moves=True)

    @precondition(lambda self: len(self.clients) < 7)
    @rule(steering=st.none() | st.tuples(st.integers(0, LAYERS - 1), factors), when=conditions)
    def open(self, steering: tuple[int, float] | None, when: When) -> None:
        """Most of what is tested needs a pause, so every session has one to begin with."""
        client = Client(self.driver.open(), self.SHAPE)
        if steering is not None:
            layer, factor = steering
            self.driver.arm(client.session, layer, action=Action.EDIT, edits=(Edit(EditOp.SCALE, factor),))
            client.steering = ((layer, factor, 0, MAX_HISTORY),)
        self.driver.arm(client.session, 0, when=when)
        self.clients.append(client)

    @precondition(lambda self: self.clients)
    @rule(which=shares, layers=st.sets(st.integers(0, LAYERS - 1), min_size=1), when=conditions, once=st.booleans())
    def arm(self, which: float, layers: set[int], when: When, once: bool) -> None:
        self.driver.arm(pick(self.clients, which).session, *sorted(layers), when=when, once=once)

    @precondition(lambda self: self.clients)
    @rule(which=shares, also=shares)
    def disarm(self, which: float, also: float) -> None:
        """Steering stays."""
        session = pick(self.clients, which).session
        pauses = self.armed(session, Action.PAUSE)
        if pauses:
            self.driver.disarm(session, pick(pauses, also))

    @precondition(lambda self: any(self.steered()))
    @rule(which=shares)
    def disarm_steering(self, which: float) -> None:
        """What has been computed with it stays so."""
        client = pick(list(self.steered()), which)
        [steering] = self.armed(client.session, Action.EDIT)
        self.driver.disarm(client.session, steering)
        for layer, factor, first, _ in client.steering:
            end = client.computed or 0
            if client.turn is not None:
                place = client.turn.checkpoint
                end = place.end if layer <= place.layer else place.first
            if end > first:
                client.made.append((layer, factor, first, end))
        client.steering = ()

    def steered(self) -> Iterator[Client]:
        """Clients of which it is known what has been computed with their steering."""
        resting = [*self.idle(), *(client for client, _ in self.paused())]
        return (each for each in resting if each.steering and (each.turn is not None or each.computed is not None))

    def armed(self, session: SessionId, action: Action) -> list[Breakpoint]:
        return [made for made in self.driver.sequence(session).breakpoints.values() if made.action is action]

    @precondition(lambda self: self.idle())
    @rule(news=st.lists(st.tuples(shares, prompts, st.integers(1, 12)), min_size=1, max_size=3))
    def submit(self, news: list[tuple[float, list[int], int]]) -> None:
        for which, new, count in news:
            client = pick(self.clients, which)
            if client.turn is None and len(client.history) + len(new) + count <= MAX_HISTORY:
                self.begin(client, new, count)

    def begin(self, client: Client, new: list[int], count: int) -> None:
        client.turn = self.driver.begin(client.session, new, count, BIASED)
        client.history += new

    @precondition(lambda self: self.driver.scheduler.has_work)
    @rule(count=st.sampled_from([1, 2, 8, 8]), moves=st.booleans())
    def steps(self, count: int, moves: bool) -> None:
        for _ in range(count):
            if self.driver.scheduler.has_work:
                self.driver.take(self.driver.engine.step())
            if moves:
                self.driver.move()

    @precondition(lambda self: self.paused())
    @rule()
    def fill(self) -> None:
        """A turn that needs nearly the whole device: who rests gives way."""
        session = self.driver.open()
        self.driver.turn(session, [7] * 46, 1)
        self.driver.close(session)

    @precondition(lambda self: self.paused())
    @rule(which=shares, until=ways_on)
    def resume(self, which: float, until: Until) -> None:
        _, turn = pick(self.paused(), which)
        self.driver.resume(turn, until)

    @precondition(lambda self: self.paused())
    @rule(which=shares, factor=factors, part=st.none() | st.tuples(shares, shares))
    def edit(self, which: float, factor: float, part: tuple[float, float] | None) -> None:
        client, turn = pick(self.paused(), which)
        place, length = turn.checkpoint, turn.checkpoint.end - turn.checkpoint.first
        first, end = place.first, place.end
        if part is not None:
            first, last = sorted(place.first + int(share * length) for share in part)
            end = last + 1
        positions = ALL if part is None else Positions(first, end)
        self.driver.edit(turn, Edit(EditOp.SCALE, factor, positions=positions))
        client.made.append((place.layer, factor, first, end))

    @precondition(lambda self: self.paused() and len(self.clients) < 8)
    @rule(which=shares)
    def fork_paused(self, which: float) -> None:
        client, turn = pick(self.paused(), which)
        self.adopt(client, self.driver.fork(turn))

    @precondition(lambda self: self.idle() and len(self.clients) < 8)
    @rule(which=shares)
    def fork_idle(self, which: float) -> None:
        self.adopt(pick(self.idle(), which), None)

    def adopt(self, client: Client, turn: Turn | None) -> None:
        session = self.driver.fork_idle(client.session) if turn is None else turn.session
        child = replace(client, session=session, history=[*client.history], made=[*client.made], turn=turn)
        self.clients.append(child)

    @precondition(lambda self: self.paused() or self.idle())
    @rule(which=shares, phase=st.sampled_from(Phase))
    def signal(self, which: float, phase: Phase) -> None:
        resting = [*self.idle(), *(client for client, _ in self.paused())]
        self.driver.do(SetPhase(self.driver.ticket(), pick(resting, which).session, phase))

    @precondition(lambda self: self.clients)
    @rule(which=shares)
    def cancel(self, which: float) -> None:
        """A pass that has not ended leaves nothing, its edits included."""
        client = pick(self.clients, which)
        if client.turn is None or (client.made and not client.turn.rests):
            return
        computed = None
        if client.turn.paused:
            computed = client.turn.checkpoint.first
            client.unmake(computed)
        self.driver.cancel(client.turn)
        self.turns_have_the_right_tokens()
        client.computed = computed

    @precondition(lambda self: self.idle())
    @rule(which=shares, share=st.floats(0, 1))
    def rewind(self, which: float, share: float) -> None:
        client = pick(self.idle(), which)
        length = int(share * len(client.history))
        self.driver.do(Rewind(self.driver.ticket(), client.session, length))
        del client.history[length:]
        client.unmake(length)
        client.computed = None if client.computed is None else min(client.computed, length)

    @precondition(lambda self: len(self.clients) > 2)
    @rule(which=shares)
    def close(self, which: float) -> None:
        client = pick(self.clients, which)
        self.driver.close(client.session)
        self.clients.remove(client)

    @invariant()
    def turns_have_the_right_tokens(self) -> None:
        for client in self.clients:
            turn = client.turn
            if turn is not None and turn.rests and not turn.paused:
                assert turn.tokens == list(client.replay(len(turn.tokens)))
                client.history += turn.tokens
                client.turn, client.computed = None, len(client.history) - 1
                assert turn.end.history_tokens == len(client.history)

    def teardown(self) -> None:
        """Every turn can be brought to its end, and closed sessions leave nothing behind."""
        for client in self.clients:
            if client.turn is not None:
                self.driver.run(client.turn, Until(end=True))
        self.turns_have_the_right_tokens()
        for client in self.clients:
            self.driver.close(client.session)
        self.driver.move()
        memory = self.driver.memory()
        assert memory.device.owned_bytes == memory.host.owned_bytes == 0


class TieredBreakpointMachine(BreakpointMachine):
    """Paused and idle sessions leave the device for the host, and give way to it under pressure."""

    HOST_BLOCKS = 20
    POLICY = KVPolicy.SIGNAL


class WindowBreakpointMachine(TieredBreakpointMachine):
    """No layer looks further back than a window, so sessions hold less than their history."""

    SHAPE = "two-layers-window"
    DEVICE_BLOCKS = 9
    HOST_BLOCKS = 12


class MixedBreakpointMachine(TieredBreakpointMachine):
    """One layer has a window, the other has none."""

    SHAPE = "two-layers-mixed"
    HOST_BLOCKS = 16


class HybridBreakpointMachine(TieredBreakpointMachine):
    """One layer folds, the other attends: a state is kept where a pass pauses, and where a session may be cut."""

    SHAPE = "two-layers-hybrid"
    DEVICE_BLOCKS = 22
    HOST_BLOCKS = 28

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        super().__init__()
        self.states: dict[SessionId, tuple[int, Tensor]] = {}
        """Of sessions that rest: their computed tokens, and the state that was seen then."""

    def engine(self, **changed: Any) -> Engine:
        engine = super().engine(kv_dir=Path(self.folder.name), **changed)
        engine._scheduler.cache.state_every = 2 * BLOCK
        return engine

    @precondition(lambda self: self.unedited())
    @rule(which=shares, by_file=st.booleans())
    def leave_and_return(self, which: float, by_file: bool) -> None:
        """The session goes on from a file of itself, or from what it has sent, as to another server."""
        driver, session, path = self.driver, pick(self.unedited(), which).session, f"{self.folder.name}/exported"
        if by_file:
            driver.do(Export(driver.ticket(), session, path))
            driver.close(session)
            driver.do(Import(driver.ticket(), session, path))
            return
        history, (out, into) = driver.sequence(session).tokens, tcp_pair()
        driver.do(SendKV(driver.ticket(), session, driver.engine.give(out)))
        driver.close(session)
        received = driver.engine.give(into), "", Residency.BEST_EFFORT, tuple(history), (), None
        driver.do(ReceiveKV(driver.ticket(), session, *received))
        driver.do(PublishKV(driver.ticket(), session))

    @rule()
    def kill(self) -> None:
        """Another engine finds the files on disk, and is told of sessions as their last turns left them."""
        before, self.driver = self.driver, drive(self.engine())
        self.driver._names, self.driver._breakpoints = before._names, before._breakpoints
        self.clients = [each for each in self.clients if not (each.steering or each.made)]
        for client in self.clients:
            old, ticket = before.sequence(client.session), self.driver.ticket()
            if client.turn is not None:
                del client.history[old.active_turn.kept :]
            client.turn = client.computed = None
            armed = tuple(old.breakpoints.values())
            self.driver.do(Open(ticket, client.session, token_ids=tuple(client.history), breakpoints=armed))

    def unedited(self) -> list[Client]:
        return [each for each in self.idle() if each.history and not (each.steering or each.made)]

    @invariant()
    def states_stay_as_they_are_until_a_pass_has_ended(self) -> None:
        """Wherever they go, and if the pass is cancelled half way up."""
        pool, host = self.driver.runner.pool, self.driver.mover.threaded._host.data
        for client in self.clients:
            sequence = self.driver.sequence(client.session)
            if client.turn is not None and not client.turn.rests:
                self.states.pop(client.session, None)
                continue
            if sequence.blocks:
                found = pool.read_states(torch.tensor([sequence.blocks[-pool.state_blocks :]]))[0].view(torch.uint8)
            elif sequence.host_blocks:
                found = host[sequence.host_blocks[-pool.state_blocks :]].flatten()
            else:
                continue
            computed, state = self.states.setdefault(client.session, (sequence.computed, found.clone()))
            if computed == sequence.computed > 0:
                assert torch.equal(found, state)
            else:
                del self.states[client.session]

    def teardown(self) -> None:
        with self.folder:
            super().teardown()


class BothBreakpointMachine(HybridBreakpointMachine):
    """Each layer folds and attends."""

    SHAPE = "two-layers-both"
    DEVICE_BLOCKS = 20
    HOST_BLOCKS = 40


@cache
def padded() -> TinyModel:
    """The same weights, with an attention that takes padding rows."""
    with tempfile.TemporaryDirectory() as folder:
        return with_attention(make_tiny("two-layers", Path(folder)), PaddedAttention())


class ReplayedBreakpointMachine(BreakpointMachine):
    """Steps of single tokens are replayed, whole or in parts; of those few are kept, and soon give way to others."""

    def model(self) -> TinyModel:
        return padded()

    def engine(self, **changed: Any) -> Engine:
        engine = super().engine(recorder=FakeRecorder(), max_draft_tokens=0, **changed)
        graphs = engine._runner._graphs
        assert graphs is not None
        graphs._kept = KeptGraphs(most_stages=4, record_after=1)
        return engine


SETTINGS = settings(stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
TestDropping = BreakpointMachine.TestCase
TestTiered = TieredBreakpointMachine.TestCase
TestWindow = WindowBreakpointMachine.TestCase
TestMixed = MixedBreakpointMachine.TestCase
TestHybrid = HybridBreakpointMachine.TestCase
TestBoth = pytest.mark.long(BothBreakpointMachine.TestCase)
TestReplayed = ReplayedBreakpointMachine.TestCase
for case in (TestDropping, TestTiered, TestWindow, TestMixed, TestHybrid, TestBoth, TestReplayed):
    case.settings = SETTINGS
TestBoth.settings = settings(SETTINGS, max_examples=10)  # the same paths as Hybrid, and few more
del case  # which pytest would run too
