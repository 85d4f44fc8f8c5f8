"""Steps given to the device before the tokens of the one before are known, and steps in parts where memory is short."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.domain.activations import Captures, CheckpointInfo
from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Pass, When
from app.domain.errors import DjinnError, EngineError
from app.domain.memory_map import StepCounts
from app.domain.values import KVPolicy, SamplingParams, SessionId, StopRule
from app.gpu.engine import Engine
from app.gpu.forward.forward import Runner
from app.gpu.forward.results import LaunchedStep, SplitStep
from app.gpu.kernels.attention.base import Batch
from app.gpu.models.base import LayerStack
from app.gpu.sampling import SampleRequest
from app.gpu.state.segments import Row
from app.messages import Arm, Event, Failed, Open, PromptScored, Submit, Token
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import STEP_TOKENS, TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import change_of, data_of, greedy, tensor_of
from tests.gpu.conversations import GREEDY, Scene, Told, numbers, same, submit
from tests.gpu.device.deferring import DeferredDevice
from tests.gpu.device.test_streams import STREAMS, defer
from tests.gpu.models.oracle import VOCAB
from tests.gpu.planning.scripted import MakeCommand, Script
from tests.gpu.wrapping import WrappedStack

pytestmark = pytest.mark.usefixtures("one_thread")

STOPS = frozenset(range(0, VOCAB, 7))
FREE = SamplingParams(seed=6, temperature=0.9, logprobs=2)
PENALISED = SamplingParams(seed=7, temperature=0.9, frequency_penalty=0.5)
CAPTURE = partial(Breakpoint, "bp_capture", (0,), Action.CAPTURE)
HALVE = Edit(EditOp.SCALE, factor=0.5)
STEER = partial(Breakpoint, "bp_steer", (0,), Action.EDIT, edits=(HALVE,))
NEVER = Breakpoint("bp_never", (1,), Action.PAUSE, When(position=10_000))


def chat(told: Told, *, name: str, seed: int, sampling: SamplingParams, armed: Breakpoint | None = None) -> Script:
    """Turns most of which a stop token ends before they have all their tokens."""
    session = SessionId(name)
    yield lambda ticket: Open(ticket, session)
    if armed is not None:
        yield lambda ticket: Arm(ticket, session, armed)
    for turn in range(5):
        stop = StopRule(12, min_tokens=5 * (turn % 2), stop_token_ids=STOPS)
        told.append(numbers((yield say(session, prompt(seed + turn, 5), sampling, stop))))


def say(session: SessionId, token_ids: Sequence[int], sampling: SamplingParams, stop: StopRule) -> MakeCommand:
    return lambda ticket: Submit(ticket, session, tuple(token_ids), sampling, stop)


CHATS = [
    partial(chat, name="greedy", seed=10, sampling=GREEDY),
    partial(chat, name="free", seed=20, sampling=FREE),
    partial(chat, name="armed", seed=30, sampling=FREE, armed=NEVER),
    partial(chat, name="watched", seed=40, sampling=GREEDY, armed=CAPTURE(When(every=6))),
    partial(chat, name="steered", seed=60, sampling=GREEDY, armed=STEER()),
    partial(chat, name="steered now and then", seed=70, sampling=FREE, armed=STEER(When(Pass.DECODE, every=3))),
    partial(chat, name="steered at tokens", seed=80, sampling=GREEDY, armed=STEER(When(token_id=3))),
]
SCENES = {
    "chats": Scene(200, 32, CHATS),
    "short of blocks": Scene(26, 32, CHATS),
    "with penalties": Scene(200, 32, [*CHATS, partial(chat, name="penalised", seed=50, sampling=PENALISED)]),
}


@pytest.fixture(scope="module")
def expected(torch_gpt2: TinyModel) -> Callable[[str], list[Told]]:
    """What the clients of a scene are told by an engine on a CPU, where no step follows another before its end."""
    return cache(lambda name: SCENES[name].play(torch_gpt2, seed=0)[0])


class Follows:
    """Stands before `Runner.launch_overlapped`: counts, and gets in its way."""

    def __init__(self, patch: pytest.MonkeyPatch, before: Callable[[int], object] = lambda number: None) -> None:
        """`before` is called with the number of each step that is to follow, from 1 on."""
        self.rows: list[int] = []
        launch_overlapped = Runner.launch_overlapped

        def noted(
            runner: Runner, step: LaunchedStep | SplitStep, rows: list[Row], requests: Sequence[SampleRequest]
        ) -> LaunchedStep | None:
            self.rows.append(len(rows))
            return None if before(len(self.rows)) else launch_overlapped(runner, step, rows, requests)

        patch.setattr(Runner, "launch_overlapped", noted)


def check_blocks(engine: Engine) -> None:
    """Raise unless sessions hold the blocks that their tokens need, no others, and nobody else holds any."""
    pool, sequences = engine._scheduler.cache.pool, engine._handler.sequences
    pool.check_integrity([*(sequence.held for sequence in sequences)])
    assert all(len(s.blocks) in (0, pool.blocks_for(s.computed)) for s in sequences)


@pytest.mark.parametrize(
    ("scene", "late"),
    [
        ("chats", None),
        *(pytest.param("chats", stream, marks=pytest.mark.long) for stream in STREAMS),
        pytest.param("short of blocks", "compute", marks=pytest.mark.long),
        pytest.param("with penalties", None, marks=pytest.mark.long),
    ],
)
def test_clients_are_told_the_same(
    torch_gpt2: TinyModel,
    expected: Callable[[str], list[Told]],
    scene: str,
    late: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follows = Follows(monkeypatch)
    device = DeferredDevice(1, late)
    with device:
        told, stage = SCENES[scene].play(defer(torch_gpt2, device, monkeypatch), 1)
    assert same(told, expected(scene))
    assert len(follows.rows) > 5
    check_blocks(stage.engine)


def one_turn(told: Told, *, sampling: SamplingParams = GREEDY, armed: Breakpoint | None = None) -> Script:
    """Five tokens, and six more."""
    session = SessionId("one")
    yield lambda ticket: Open(ticket, session)
    if armed is not None:
        yield lambda ticket: Arm(ticket, session, armed)
    yield submit(session, prompt(1, 5), 6, sampling)


@pytest.mark.parametrize(
    ("script", "blocks", "steps"),
    [
        pytest.param(one_turn, 60, 4, id="all but the prompt's and the one after it"),
        pytest.param(partial(one_turn, sampling=FREE), 60, 4, id="a token that is drawn"),
        pytest.param(partial(one_turn, sampling=PENALISED), 60, 0, id="a token that depends on those before"),
        pytest.param(partial(one_turn, armed=NEVER), 60, 4, id="a breakpoint that is never met"),
        pytest.param(partial(one_turn, armed=CAPTURE(When(token_id=VOCAB - 1))), 60, 0, id="one that may be met"),
        # The step at position 7 is planned when the tokens before it are known.
        pytest.param(partial(one_turn, armed=CAPTURE(When(position=7))), 60, 3, id="one that is met once"),
        pytest.param(partial(one_turn, armed=STEER()), 60, 4, id="an edit that is always made"),
        pytest.param(partial(one_turn, armed=STEER(When(Pass.DECODE, every=2))), 60, 2, id="made at even positions"),
        pytest.param(partial(one_turn, armed=STEER(When(position=7), once=True)), 60, 2, id="an edit made once"),
        # Eleven tokens, of which the last is never computed, need three blocks of four.
        pytest.param(one_turn, 3, 4, id="just enough blocks"),
    ],
)
def test_the_steps_that_follow(
    torch_gpt2: TinyModel, script: Callable[[Told], Script], blocks: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DeferredDevice(0, late="compute")
    with device:
        _, stage = Scene(blocks, 16, [script]).play(defer(torch_gpt2, device, monkeypatch), 0)
    assert replace(stage.engine._runner.counts(), tokens=0) == StepCounts(eager=6, followed=steps)


def play_one(model: TinyModel, patch: pytest.MonkeyPatch, on_events: Callable[[Engine, Sequence[Event]], None]) -> None:
    """One turn on a device that is late; `on_events` sees what the client is told."""
    device = DeferredDevice(0, late="compute")
    with device:
        Scene(60, 16, [one_turn], on_events=on_events).play(defer(model, device, patch), 0)


def test_a_step_that_cannot_follow_fails_its_turns_after_the_tokens_before_it(
    torch_gpt2: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> None:
        if number == 3:
            raise RuntimeError("the device is on fire")

    Follows(monkeypatch, fail)
    said: list[Event] = []
    with pytest.raises(DjinnError, match="the device is on fire") as raised:
        play_one(torch_gpt2, monkeypatch, lambda _, events: said.extend(events))
    assert isinstance(raised.value, EngineError)
    assert sum(isinstance(event, Token) for event in said) == 4
    assert any(isinstance(event, Failed) for event in said)


COUNT = 6
PROMPTS = [prompt(seed, length) for seed, length in enumerate([40, 1, 17, 33, 8, 1, 25, 9])]
ADD = Edit(EditOp.ADD, 2.0, data_of(2 * vector(3, 48)))


def ask_device() -> object:
    """As a GPU refuses it."""
    raise torch.OutOfMemoryError("CUDA out of memory.")


class ShortOfMemory(WrappedStack):
    """Gives up a layer half-way where there is too little memory for it.

    That is with more than `most` tokens at once, from `first_layer` on. What an attempt that failed has left in the
    slots of its tokens is not to be relied on: they hold NaN.
    """

    def __init__(self, stack: LayerStack) -> None:
        super().__init__(stack)
        self.active = False
        """Not while an engine is put together: that its steps do not fit then would be an error."""
        self.most: int | None = None
        self.first_layer = 0
        self.unfit_context: int | None = None
        """No row with at least so many tokens fits, however few of them are new."""
        self.ask: Callable[[], object] = ask_device
        """Asks for memory that there is not."""
        self.failures = 0
        self.sizes: list[int] = []
        """Tokens of each batch that the first layer has run."""

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        if self.active and index >= self.first_layer and self._fails(batch, len(hidden)):
            self.failures += 1
            kv[batch.slot_blocks, :, :, batch.slot_offsets] = torch.nan
            self.ask()
        if index == 0:
            self.sizes.append(len(hidden))
        return super().layer(index, hidden, batch, kv)

    def _fails(self, batch: Batch, tokens: int) -> bool:
        unfit = self.unfit_context is not None and int(batch.contexts.max()) >= self.unfit_context
        return unfit or (self.most is not None and tokens > self.most)


@pytest.fixture
def short(tiny_llama: TinyModel) -> ShortOfMemory:
    return ShortOfMemory(tiny_llama.stack)


def drive(model: TinyModel, stack: ShortOfMemory, **settings: Any) -> BreakDriver:
    driver = BreakDriver(replace(model, stack=stack).engine(**settings))
    stack.active = True
    return driver


def failed(driver: BreakDriver, turn: Turn) -> EngineError:
    """Step until the turn fails; returns why."""
    while True:
        events = driver.engine.step()
        failures = [event for event in events if isinstance(event, Failed)]
        driver.take([event for event in events if event not in failures])
        for event in failures:
            assert event.ticket == turn.tickets[-1]
            assert isinstance(event.error, EngineError)
            return event.error


@pytest.mark.parametrize(
    ("most", "first_layer", "ask", "room"),
    [
        (1, 0, ask_device, {}),
        (2, 3, ask_device, {}),
        (7, 2, ask_device, {}),
        (20, 0, ask_device, {}),
        (3, 1, lambda: torch.empty(1 << 60, dtype=torch.uint8), {}),  # of the host
        (3, 1, lambda: np.empty(1 << 60, np.uint8), {}),
        (5, 1, ask_device, {"blocks": 14, "host_blocks": 6, "policy": KVPolicy.LRU}),
    ],
)
def test_every_turn_gets_its_tokens(
    tiny_llama: TinyModel,
    short: ShortOfMemory,
    most: int,
    first_layer: int,
    ask: Callable[[], object],
    room: dict[str, Any],
) -> None:
    """Whoever refuses the memory, and where: also in a pool that is too small."""
    short.most, short.first_layer, short.ask = most, first_layer, ask
    driver = drive(tiny_llama, short, **room)
    turns = [driver.begin(driver.open(), tokens, COUNT) for tokens in PROMPTS]
    driver.settle(*turns)
    assert [turn.tokens for turn in turns] == [greedy(tiny_llama.oracle, tokens, COUNT) for tokens in PROMPTS]
    assert short.failures


def watch(driver: BreakDriver) -> tuple[list[Turn], list[Captures], list[CheckpointInfo]]:
    """Sessions with breakpoints of every kind; their turns, what was captured, and where one of them paused."""
    steered, pauses = driver.open_armed(1, action=Action.EDIT, edits=(ADD,)), driver.open_armed(1, 2)
    driver.arm(steered, 0, 2, action=Action.CAPTURE)
    driver.arm(steered, 1, action=Action.CAPTURE, when=When(every=4))
    driver.arm(pauses, 0, action=Action.EDIT, edits=(ADD,), once=True)
    driver.arm(pauses, 2, action=Action.CAPTURE)
    sessions = [steered, pauses, *(driver.open() for _ in range(3))]
    turns = [driver.begin(session, tokens, COUNT) for session, tokens in zip(sessions, PROMPTS, strict=False)]
    found = driver.run(turns[1])
    driver.settle(*turns)
    return turns, [driver.captures(session) for session in (steered, pauses)], found


@pytest.mark.parametrize(("most", "first_layer"), [(1, 0), (3, 1), (10, 2)])
def test_breakpoints_see_and_do_what_they_would_have(
    tiny_llama: TinyModel, short: ShortOfMemory, most: int, first_layer: int
) -> None:
    """Each capture is there once, each edit is made once, each pause has its whole pass."""
    turns, captures, pauses = watch(BreakDriver(tiny_llama.engine()))
    short.most, short.first_layer = most, first_layer
    driver = drive(tiny_llama, short)
    found_turns, found_captures, found_pauses = watch(driver)
    assert short.failures
    assert [(at.layer, at.first, at.end) for at in found_pauses] == [(at.layer, at.first, at.end) for at in pauses]
    assert [turn.tokens for turn in found_turns] == [turn.tokens for turn in turns]
    assert turns[0].tokens == greedy(tiny_llama.oracle, PROMPTS[0], COUNT, [change_of(1, ADD)])
    for found, wanted in zip(found_captures, captures, strict=True):
        assert len(found.records) == len(wanted.records)
        for record, other in zip(found.records, wanted.records, strict=True):
            assert (record.breakpoint, record.layer) == (other.breakpoint, other.layer)
            assert (record.positions, record.token_ids) == (other.positions, other.token_ids)
            torch.testing.assert_close(tensor_of(record.tensor), tensor_of(other.tensor), rtol=1e-4, atol=1e-4)


def test_prompts_are_scored_in_parts(tiny_llama: TinyModel, short: ShortOfMemory) -> None:
    sampling = replace(GREEDY, prompt_logprobs=2, logprobs=1)
    driver, plain = drive(tiny_llama, short), BreakDriver(tiny_llama.engine())
    short.most = 3
    scored = []
    for each in (driver, plain):
        turn = each.begin(each.open(), PROMPTS[0], COUNT, sampling)
        others = [each.begin(each.open(), tokens, COUNT) for tokens in PROMPTS[1:4]]
        each.settle(turn, *others)
        [found] = [event for event in turn.said if isinstance(event, PromptScored)]
        scored.append(found)
    found, wanted = scored
    assert [entry.token_id for entry in found.logprobs] == PROMPTS[0][1:]
    assert [e.logprob for e in found.logprobs] == pytest.approx([e.logprob for e in wanted.logprobs], abs=1e-4)


def test_what_never_fits_fails_alone_and_says_why(tiny_llama: TinyModel, short: ShortOfMemory) -> None:
    driver = drive(tiny_llama, short)
    short.unfit_context = 30
    others = [driver.begin(driver.open(), tokens, COUNT) for tokens in (PROMPTS[1], PROMPTS[4])]
    session = driver.open()
    first = driver.turn(session, prompt(20, 12), 2)
    history = prompt(20, 12) + first.tokens
    turn = driver.begin(session, PROMPTS[0], COUNT)
    error = failed(driver, turn)
    assert "memory is too short" in error.message
    assert str(len(history) + len(PROMPTS[0])) in error.message
    driver.settle(*others)
    assert [each.tokens for each in others] == [
        greedy(tiny_llama.oracle, tokens, COUNT) for tokens in (PROMPTS[1], PROMPTS[4])
    ]
    again = driver.turn(session, [4, 5], COUNT)
    assert again.tokens == greedy(tiny_llama.oracle, [*history, 4, 5], COUNT)


def test_steps_grow_again_when_there_is_room(tiny_llama: TinyModel, short: ShortOfMemory) -> None:
    driver = drive(tiny_llama, short, max_draft_tokens=0)
    short.most, short.sizes = 4, []
    driver.turn(driver.open(), prompt(1, 3 * STEP_TOKENS), 2)
    assert max(short.sizes) == 4
    short.most, short.sizes = None, []
    for seed in range(8):
        driver.turn(driver.open(), prompt(seed, 3 * STEP_TOKENS), 24)
    sizes = [size for size in short.sizes if size > 1]
    assert sizes[:5] == [4] * 5
    assert sizes[-3:] == [STEP_TOKENS] * 3
