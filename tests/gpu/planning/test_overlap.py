"""Steps that the device is given before the tokens of the step that it runs are known."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import pytest

from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Pass, When
from app.domain.errors import DjinnError, EngineError
from app.domain.memory_map import StepCounts
from app.domain.values import SamplingParams, SessionId, StopRule
from app.gpu.engine import Engine
from app.gpu.forward.forward import Runner
from app.gpu.forward.results import LaunchedStep, SplitStep
from app.gpu.sampling import SampleRequest
from app.gpu.state.segments import Row
from app.messages import Arm, Event, Failed, Open, Submit, Token
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.conversations import GREEDY, Scene, Told, numbers, same, submit
from tests.gpu.device.deferring import DeferredDevice
from tests.gpu.device.test_streams import STREAMS, defer
from tests.gpu.models.oracle import VOCAB
from tests.gpu.planning.scripted import MakeCommand, Script

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
