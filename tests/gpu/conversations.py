"""What several clients of one engine do, and what each of them is told: the same, whoever else is there and whatever
the device does first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from app.domain.activations import Activation, Captures, LensRows
from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Pass, Positions, TensorData, Until, When
from app.domain.values import KVPolicy, Phase, SamplingParams, SessionId, StopRule
from app.gpu.engine import Engine
from app.messages import (
    Arm,
    Cancel,
    Close,
    Done,
    EditCheckpoint,
    Event,
    Fork,
    Lens,
    Open,
    Paused,
    PromptScored,
    ReadCaptures,
    ReadCheckpoint,
    Resume,
    Rewind,
    SetPhase,
    Submit,
    Token,
    TurnFinished,
    WriteCheckpoint,
)
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import data_of
from tests.gpu.planning.scripted import Interrupted, MakeCommand, Play, Script

Told = list[Any]
"""What a client has been told, in numbers."""
GREEDY = SamplingParams(seed=0, temperature=0)
HIDDEN = 48
"""Of all tiny models."""


@dataclass(frozen=True)
class Scene:
    """Clients of one engine with so many blocks on the device, and on the host."""

    blocks: int
    max_step_tokens: int
    scripts: Sequence[Callable[[Told], Script]]
    host_blocks: int = 400
    on_events: Callable[[Engine, Sequence[Event]], None] = lambda engine, events: None

    def play(self, model: TinyModel, seed: int) -> tuple[list[Told], Play]:
        """What each client is told, and the play when it has ended."""
        engine = model.engine(
            blocks=self.blocks,
            host_blocks=self.host_blocks,
            max_step_tokens=self.max_step_tokens,
            policy=KVPolicy.SIGNAL,
        )
        told: list[Told] = [[] for _ in self.scripts]
        scripts = [script(each) for script, each in zip(self.scripts, told, strict=True)]
        stage = Play(engine, scripts, seed, self.on_events)
        stage.run()
        return told, stage


def submit(
    session: SessionId, token_ids: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY
) -> MakeCommand:
    return lambda ticket: Submit(ticket, session, tuple(token_ids), sampling, StopRule(max_tokens))


def talk(told: Told, *, name: str, seed: int, sampling: SamplingParams) -> Script:
    """Turns with waits between them, in which the KV leaves the device and comes back."""
    session = SessionId(name)
    yield lambda ticket: Open(ticket, session)
    for turn in range(3):
        told.append(numbers((yield submit(session, prompt(seed + turn, 21 + 3 * turn), 9, sampling))))
        yield lambda ticket: SetPhase(ticket, session, Phase.IO_WAIT)
        if turn:
            yield lambda ticket: SetPhase(ticket, session, Phase.READY)


def debug(told: Told, *, name: str, seed: int) -> Script:
    """A turn that pauses in its prompt and at some of its tokens; what is read there is changed and read again."""
    session = SessionId(name)
    yield lambda ticket: Open(ticket, session)
    pause = Breakpoint("bp_pause", (0, 1), Action.PAUSE, When(every=5))
    yield lambda ticket: Arm(ticket, session, pause)
    said = yield submit(session, prompt(seed, 19), 12)
    halve = (Edit(EditOp.SCALE, factor=0.5, positions=Positions(last=True)),)
    while isinstance(said[-1], Paused):
        told.append(numbers(said))
        told.append(numbers((yield lambda ticket: ReadCheckpoint(ticket, session, Positions()))))
        yield lambda ticket: EditCheckpoint(ticket, session, halve)
        yield lambda ticket: SetPhase(ticket, session, Phase.IO_WAIT)
        told.append(numbers((yield lambda ticket: Lens(ticket, session, Positions(last=True), 3))))
        said = yield lambda ticket: Resume(ticket, session, Until())
    told.append(numbers(said))


def nap(told: Told, *, name: str, seed: int) -> Script:
    """Pauses that are followed at once by a wait, in which the half-written KV leaves the device, or by a resume."""
    session = SessionId(name)
    yield lambda ticket: Open(ticket, session)
    pause = Breakpoint("bp_nap", (1,), Action.PAUSE, When(every=4))
    yield lambda ticket: Arm(ticket, session, pause)
    said = yield submit(session, prompt(seed, 31), 12)
    while isinstance(said[-1], Paused):
        told.append(numbers(said))
        if len(told) % 2:
            yield lambda ticket: SetPhase(ticket, session, Phase.IO_WAIT)
        said = yield lambda ticket: Resume(ticket, session, Until())
    told.append(numbers(said))


def watch(told: Told, *, name: str, seed: int) -> Script:
    """Captures of every layer, while others compute."""
    session = SessionId(name)
    yield lambda ticket: Open(ticket, session)
    capture = Breakpoint("bp_capture", (0, 1, 2), Action.CAPTURE, When(Pass.DECODE))
    yield lambda ticket: Arm(ticket, session, capture)
    told.append(numbers((yield submit(session, prompt(seed, 30), 8))))
    told.append(numbers((yield lambda ticket: ReadCaptures(ticket, session))))


def steer(told: Told, *, name: str, seed: int) -> Script:
    """Edits with a vector after every layer, at every position."""
    session = SessionId(name)
    yield lambda ticket: Open(ticket, session)
    edits = (
        Edit(EditOp.ADD, 0.7, data_of(vector(seed, HIDDEN))),
        Edit(EditOp.CLAMP, 0.3, data_of(vector(seed + 1, HIDDEN)), max_norm=2.0),
    )
    yield lambda ticket: Arm(ticket, session, Breakpoint("bp_steer", (0, 1, 2), Action.EDIT, edits=edits))
    for turn in range(2):
        told.append(numbers((yield submit(session, prompt(seed + turn, 19), 7))))


def rewrite(told: Told, *, name: str, seed: int) -> Script:
    """A pass whose residual stream the client writes. Then the KV is lost, so that it is computed with that again."""
    session, other = SessionId(name), SessionId(f"{name}-other")
    yield lambda ticket: Open(ticket, session)
    yield lambda ticket: Open(ticket, other)
    pause = Breakpoint("bp_rewrite", (1,), Action.PAUSE, When(Pass.PREFILL), once=True)
    yield lambda ticket: Arm(ticket, session, pause)
    told.append(numbers((yield submit(session, prompt(seed, 14), 4))))
    written = data_of(vector(seed, 14 * HIDDEN).view(14, HIDDEN))
    yield lambda ticket: WriteCheckpoint(ticket, session, written)
    told.append(numbers((yield lambda ticket: Resume(ticket, session, Until(end=True)))))
    told.append(numbers((yield submit(other, prompt(seed + 1, 55), 4))))
    said = yield submit(session, prompt(seed + 2, 3), 4)
    assert isinstance(said[-1], TurnFinished)
    assert said[-1].usage.tokens_recomputed
    told.append(numbers(said))


def fork(told: Told, *, name: str, seed: int) -> Script:
    """A cancelled turn, and two ways on from what it left."""
    session, child = SessionId(name), SessionId(f"{name}-child")
    yield lambda ticket: Open(ticket, session)
    turn = submit(session, prompt(seed, 11), 40)
    said = numbers((yield Interrupted(turn, 3, lambda ticket, turn: Cancel(ticket, session, turn, keep=3))))
    told.append([*said[:6], said[-1]])  # the turn may have come further before the engine heard of it
    yield lambda ticket: Fork(ticket, session, child)
    for each in (session, child):
        told.append(numbers((yield submit(each, [5, 6], 7))))


def cross(told: Told, *, name: str, seed: int) -> Script:
    """A session that waits, two that take its blocks, the second of which is closed in the middle of its prompt: so the
    blocks are free while the device still writes to them. Then the first comes back.
    """
    first, second, third = (SessionId(f"{name}-{number}") for number in range(3))
    yield lambda ticket: Open(ticket, first)
    yield lambda ticket: Open(ticket, second)
    yield lambda ticket: Open(ticket, third)
    for turn in range(2):
        told.append(numbers((yield submit(first, prompt(seed + turn, 18), 3))))
        yield lambda ticket: SetPhase(ticket, first, Phase.IO_WAIT)
        told.append(numbers((yield submit(second, prompt(seed + 10 + turn, 25), 3))))
        yield lambda ticket: Rewind(ticket, second, 0)
    yield Interrupted(submit(third, prompt(seed + 20, 60), 1), 0, lambda ticket, _: Close(ticket, third))
    told.append(numbers((yield submit(first, prompt(seed + 3, 3), 5))))


SAMPLED = SamplingParams(seed=3, temperature=0.9, top_p=0.9, logprobs=2, repetition_penalty=1.1, presence_penalty=0.2)
SCORED = SamplingParams(seed=4, temperature=0.7, min_p=0.01, prompt_logprobs=2, logit_bias={7: 2.0})
CROWD = Scene(
    60,
    16,
    [
        partial(talk, name="greedy", seed=10, sampling=GREEDY),
        partial(talk, name="sampled", seed=20, sampling=SAMPLED),
        partial(talk, name="scored", seed=30, sampling=SCORED),
        partial(talk, name="free", seed=40, sampling=SamplingParams(seed=5)),
        partial(debug, name="debugged", seed=50),
        partial(watch, name="watched", seed=60),
        partial(fork, name="forked", seed=70),
        partial(nap, name="napping", seed=80),
        partial(steer, name="steered", seed=90),
    ],
)
"""More than fit on the device at once."""
ALONE = Scene(60, 16, [partial(nap, name="napping", seed=80)])
"""Steps that sample nothing, so that nobody waits for them."""
CROSSING = Scene(16, 32, [partial(cross, name="crossing", seed=90)])
"""Blocks that go from hand to hand."""
REWRITTEN = Scene(16, 32, [partial(rewrite, name="rewritten", seed=100)], host_blocks=0)
"""Edits with a row for each position that are made again."""


def numbers(said: list[Event]) -> Told:
    """What events say that does not depend on who else was there, and when."""
    return [value for event in said for value in _numbers(event)]


def _numbers(event: Event) -> Iterator[Any]:
    match event:
        case Token():
            yield event.token_id
            yield event.logprobs and [event.logprobs.logprob, *(each for pair in event.logprobs.top for each in pair)]
        case PromptScored():
            yield from ([entry.token_id, entry.logprob, *map(list, entry.top)] for entry in event.logprobs)
        case Paused():
            yield from (event.checkpoint.layer, event.checkpoint.first, event.checkpoint.end)
        case TurnFinished():
            yield event.history_tokens
            yield [[made.first, made.end, made.boundary, *made.edit.digest()] for made in event.interventions or ()]
        case Done():
            yield from _values(event.value)


def _values(value: Any) -> Iterator[Any]:
    value = value() if callable(value) else value
    if isinstance(value, Activation):
        yield from (value.first, value.end, array_of(value.tensor))
    elif isinstance(value, Captures):
        assert not value.dropped
        for each in value.records:
            yield from (each.layer, each.positions, array_of(each.tensor.joined()))
    elif isinstance(value, LensRows):
        yield from (value.first, value.token_ids, *(list(map(list, row)) for row in value.rows))


def array_of(data: TensorData) -> list[list[float]]:
    found: list[list[float]] = np.frombuffer(data.data, np.float32).reshape(data.shape).tolist()
    return found


def same(found: Any, wanted: Any) -> bool:
    """Whether two transcripts differ by no more than the order of additions makes a difference."""
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, float):
        return bool(found == pytest.approx(wanted, rel=1e-3, abs=1e-4))
    return bool(found == wanted)
