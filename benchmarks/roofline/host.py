"""What the host does for a decode step, measured with a device that takes no time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random

import numpy as np

from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Pass, When
from app.domain.memory_map import MemoryMap
from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.engine_process.frames import encode_events
from app.gpu.engine import Engine
from app.messages import Arm, Done, Event, Inspect, Open, Submit, Token
from benchmarks.engine.away import random_tokens
from benchmarks.roofline.null_device import LAYERS, NullStreams, null_draws, null_engine
from benchmarks.roofline.stages import CLIENT, EVENTS, STAGES, Stopwatch, charging
from loadgen.errors import NotAsMeant
from loadgen.experiments.density.running import few_collections

SAMPLINGS = {
    "greedy": SamplingParams(seed=0, temperature=0),
    "drawn": SamplingParams(seed=0),
    "drawn with top_p": SamplingParams(seed=0, top_p=0.9),
}
SLACK_TOKENS = 512
"""More than sessions generate while others' prompts are computed."""
STEERING = Breakpoint(
    "bp_0000000000000000", (LAYERS // 2,), Action.EDIT, When(Pass.DECODE), (Edit(EditOp.SCALE, factor=1.5),)
)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """`steps` are measured after `warm_up` of them, of sessions whose prompts have `context` tokens."""

    context: int
    steps: int
    warm_up: int


@dataclass(frozen=True, slots=True)
class HostStep:
    """CPU time of the engine's thread for a step of `sessions` rows, in microseconds.

    `in_turn`: each step waits for the one before; else it is launched while that one seems to run, as beside a GPU with
    enough to do. `stages_us` are means, taken in another run. `copies` and `events`: what a step asks of the device's
    streams. `watched` of the rows are edited half-way up the layers.
    """

    sessions: int
    sampling: str
    in_turn: bool
    p50_us: float
    p99_us: float
    stages_us: dict[str, float]
    copies: float
    events: float
    tokens: int
    """That the measured steps made."""
    watched: int = 0


class Client:
    """Takes an engine's events on the engine's thread, and stops it after `plan.steps` steps in which every session has
    had a token. `encode` is what the engine's process does with events.
    """

    def __init__(
        self, engine: Engine, sessions: int, plan: HostPlan, encode: Callable[[Sequence[Event]], object]
    ) -> None:
        self._engine, self._sessions, self._plan, self._encode = engine, sessions, plan, encode
        self.steps_ns: list[int] = []
        self.tokens = 0
        self.begin: Callable[[], None] = lambda: None
        """Called when the steps begin that are measured."""
        self.end: Callable[[], None] = lambda: None
        self._full = self._spent = 0
        self._left = time.thread_time_ns()

    def deliver(self, events: Sequence[Event]) -> None:
        """See `Engine.run`. What is done here beside the encoding is not counted."""
        self._encode(events)
        self._spent += time.thread_time_ns() - self._left
        if sum(isinstance(event, Token) for event in events) == self._sessions:
            self._full += 1
            self._note(self._full - self._plan.warm_up)
            self._spent = 0
        self._left = time.thread_time_ns()

    def _note(self, number: int) -> None:
        if 0 < number <= self._plan.steps:
            self.tokens += self._sessions
            self.steps_ns.append(self._spent)
        if number == self._plan.steps:
            self.end()
            self._engine.stop()
        if number == 0:
            self.begin()


def measure_step(sessions: int, sampling: str, plan: HostPlan, *, in_turn: bool, watched: int = 0) -> HostStep:
    """Two runs: one for the time of each step, one for the stages. Raises `NotAsMeant` if steps run otherwise than is
    meant.
    """
    timed, streams = _run(sessions, sampling, plan, in_turn, watched, None)
    stopwatch = Stopwatch()
    _run(sessions, sampling, plan, in_turn, watched, stopwatch)
    p50, p99 = np.percentile(timed.steps_ns, (50, 99)) / 1e3
    return HostStep(
        sessions,
        sampling,
        in_turn,
        float(p50),
        float(p99),
        {stage: stopwatch.charged[stage] / plan.steps / 1e3 for stage in STAGES},
        streams.copies / plan.steps,
        streams.events / plan.steps,
        timed.tokens,
        watched,
    )


def _run(
    sessions: int, sampling: str, plan: HostPlan, in_turn: bool, watched: int, stopwatch: Stopwatch | None
) -> tuple[Client, NullStreams]:
    streams = NullStreams(busy=not in_turn)
    answer = SLACK_TOKENS + plan.warm_up + plan.steps
    engine = null_engine(streams, sessions, plan.context + answer)
    encode = encode_events if stopwatch is None else stopwatch.around(encode_events, EVENTS)
    client = Client(engine, sessions, plan, encode)
    deliver = client.deliver if stopwatch is None else stopwatch.around(client.deliver, CLIENT)
    client.begin = streams.forget if stopwatch is None else stopwatch.start
    client.end = streams.hold if stopwatch is None else stopwatch.stop
    random = Random(0)
    for number in range(sessions):
        session = SessionId(f"session-{number}")
        engine.send(Open(Ticket(3 * number + 1), session))
        if number < watched:
            engine.send(Arm(Ticket(3 * number + 2), session, STEERING))
        prompt = tuple(random_tokens(random, plan.context))
        engine.send(Submit(Ticket(3 * number + 3), session, prompt, SAMPLINGS[sampling], StopRule(answer)))
    with few_collections(), null_draws(), nullcontext() if stopwatch is None else charging(stopwatch):
        engine.run(deliver)
    _check(engine, plan, in_turn, watched)
    return client, streams


def _check(engine: Engine, plan: HostPlan, in_turn: bool, watched: int) -> None:
    """Raise `NotAsMeant` unless the steps were replayed, and launched when they were meant to be."""
    [answer] = engine.handle(Inspect(Ticket(0)))
    assert isinstance(answer, Done)
    assert isinstance(answer.value, MemoryMap)
    steps, wanted = answer.value.steps, plan.steps
    replayed = steps.in_runs if watched else steps.replayed
    if replayed < wanted or (steps.followed > 0 if in_turn else steps.followed < wanted):
        raise NotAsMeant(f"of {wanted} steps {replayed} were replayed, and {steps.followed} launched ahead")
