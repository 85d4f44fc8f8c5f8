"""`python -m benchmarks.host`: what the host does for a decode step of the CUDA path, measured with a device that
takes no time. It needs Triton and no GPU, and takes two minutes.

Streams, memory and a model whose work is done at once, because there is none. What stays is the host's part: an
engine around it plans, builds inputs, launches, reads results and tells of them. Tensors are on the CPU and as small
as can be, so that an operator on them takes about what its launch would. A GPU's driver is not in these times.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Pass, When
from app.domain.memory_map import MemoryMap
from app.domain.points import Points
from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.engine_process.frames import encode_events
from app.gpu.device.streams import PASSED, WHOLE, CpuStream, Run, Stream
from app.gpu.device.streams import Event as Mark
from app.gpu.engine import Engine
from app.gpu.forward.graphs import CudaRecorder
from app.gpu.kernels.attention.base import Batch
from app.gpu.sampling import triton_draw
from app.gpu.startup.loader import build_engine
from app.gpu.startup.weights import LoadedModel
from app.gpu.state.checkpoints import InParts
from app.gpu.state.layer_state import LayerState, TokenState
from app.messages import Arm, Done, Event, Inspect, Open, Submit, Token
from app.model_store.resolve import resolve
from benchmarks.command import bind_to_cores
from benchmarks.engine.live import random_tokens
from benchmarks.engine.loading import make_settings
from benchmarks.measuring import DISTURBED_SHARE, CpuMeter
from benchmarks.record import RESULTS, write_run
from benchmarks.record import Run as Record
from loadgen.errors import NotAsMeant
from loadgen.experiments.density.running import few_collections
from loadgen.options.common import EXIT_OK
from loadgen.report.tables import Row, Table, Target, exact, figure_table, to_markdown, to_rich

MODEL = "random:tiny-llama"
"""Gives the engine a name and a tokenizer; no weight of it is made."""
LAYERS = 32
VOCABULARY = 8
"""Tokens that one is chosen of: a device does that, and here it is to take no time."""
STEP_TOKENS = 8192
"""Prompts are to end soon."""


class _NotYet:
    """A point that the device seems not to have passed until somebody waits for it. Then it has."""

    def __init__(self) -> None:
        self._passed = False

    def query(self) -> bool:
        return self._passed

    def synchronize(self) -> None:
        self._passed = True


class NullStreams(CpuStream):
    """See `DeviceStreams`: five times the same stream, whose copies are done at once. A `busy` device never has a step
    ready before the host waits for it, so that the host launches the next one meanwhile, as beside a GPU with enough
    to do.
    """

    on_host = False

    def __init__(self, *, busy: bool) -> None:
        self._busy = busy
        self.compute: Stream = self
        self.to_host: Stream = self
        self.to_device: Stream = self
        self.saves: Stream = self
        self.weights: Stream = self
        self.copies = self.events = 0
        self._counts = True

    def forget(self) -> None:
        """Count from 0 again."""
        self.copies = self.events = 0

    def hold(self) -> None:
        """Count nothing any more."""
        self._counts = False

    def record(self) -> Mark:
        self.events += self._counts
        return _NotYet() if self._busy else PASSED

    def copy(self, target: Tensor, source: Tensor, runs: Iterable[Run] = WHOLE) -> None:
        self.copies += self._counts
        super().copy(target, source, runs)

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def host_slab(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8)


class NullStack:
    """See `LayerStack`. It thinks as much of one token as of another."""

    num_layers, hidden_size, kv_heads, head_dim = LAYERS, 1, 1, 1
    states: Sequence[LayerState] = (TokenState(2),) * LAYERS
    vocab_size, parameter_bytes = VOCABULARY, 0
    dtype, device = torch.float32, torch.device("cpu")
    points: Points = MappingProxyType({})
    head_in_parts = None

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return torch.zeros(len(token_ids), self.hidden_size)

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        return self.unembed(hidden)

    def unembed(self, normed: Tensor) -> Tensor:
        return torch.ones(len(normed), self.vocab_size)

    def toward(self, token_id: int) -> InParts[Tensor]:
        yield None
        return torch.ones(self.hidden_size)

    def written(self, *_: Any, **__: Any) -> Tensor | None:
        return None


class NullRecorder(CudaRecorder):
    """Runs work when it is recorded. A replay is a call that does nothing."""

    def __init__(self) -> None:
        pass

    def record(self, work: Callable[[], None], *, concurrent: bool = False) -> Callable[[], None]:
        work()
        return lambda: None

    def forget(self) -> None:
        pass


@contextmanager
def null_draws() -> Iterator[None]:
    """Within the block a draw is an operator of PyTorch: Triton's launch, and what it costs the host, is left out."""

    def chosen(probabilities: Tensor, *_rest: object) -> Tensor:
        return probabilities.new_zeros(len(probabilities), dtype=torch.int64)

    with mock.patch.object(triton_draw, "draw", chosen):
        yield


def null_engine(streams: NullStreams, sessions: int, tokens: int) -> Engine:
    """An engine that replays decode steps on such a device, with room for so many sessions of so many tokens. Its
    settings are the server's defaults but for `STEP_TOKENS`.
    """
    settings = make_settings(
        "cpu", MODEL, kv_device=f"{sessions}x{tokens}", kv_host="16MiB", max_draft_tokens=0, max_step_tokens=STEP_TOKENS
    )
    loaded = LoadedModel(NullStack(tokens), streams)
    return build_engine(resolve(MODEL, cache_dir=Path()), loaded, settings.engine(), NullRecorder())


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
    enough to do. `copies` and `events`: what a step asks of the device's streams. `watched` of the rows are edited
    half-way up the layers.
    """

    sessions: int
    sampling: str
    in_turn: bool
    p50_us: float
    p99_us: float
    copies: float
    events: float
    tokens: int
    """That the measured steps made."""
    watched: int = 0


class Client:
    """Takes an engine's events on the engine's thread, and stops it after `plan.steps` steps in which every session has
    had a token. Events are made a frame, as in the engine's process.
    """

    def __init__(self, engine: Engine, streams: NullStreams, sessions: int, plan: HostPlan) -> None:
        self._engine, self._streams, self._sessions, self._plan = engine, streams, sessions, plan
        self.steps_ns: list[int] = []
        self._full = self._spent = 0
        self._left = time.thread_time_ns()

    def deliver(self, events: Sequence[Event]) -> None:
        """See `Engine.run`. What is done here beside the encoding is not counted."""
        encode_events(events)
        self._spent += time.thread_time_ns() - self._left
        if sum(isinstance(event, Token) for event in events) == self._sessions:
            self._full += 1
            number = self._full - self._plan.warm_up
            if 0 < number <= self._plan.steps:
                self.steps_ns.append(self._spent)
            if number == self._plan.steps:
                self._streams.hold()
                self._engine.stop()
            if number == 0:
                self._streams.forget()
            self._spent = 0
        self._left = time.thread_time_ns()


def measure_step(sessions: int, sampling: str, plan: HostPlan, *, in_turn: bool, watched: int = 0) -> HostStep:
    """Raises `NotAsMeant` if steps run otherwise than is meant."""
    streams = NullStreams(busy=not in_turn)
    answer = SLACK_TOKENS + plan.warm_up + plan.steps
    engine = null_engine(streams, sessions, plan.context + answer)
    client, random = Client(engine, streams, sessions, plan), Random(0)
    for number in range(sessions):
        session = SessionId(f"session-{number}")
        engine.send(Open(Ticket(3 * number + 1), session))
        if number < watched:
            engine.send(Arm(Ticket(3 * number + 2), session, STEERING))
        prompt = tuple(random_tokens(random, plan.context))
        engine.send(Submit(Ticket(3 * number + 3), session, prompt, SAMPLINGS[sampling], StopRule(answer)))
    with few_collections(), null_draws():
        engine.run(client.deliver)
    _check(engine, plan, in_turn, watched)
    p50, p99 = (float(each) / 1e3 for each in np.percentile(client.steps_ns, (50, 99)))
    copies, events = streams.copies / plan.steps, streams.events / plan.steps
    tokens = sessions * len(client.steps_ns)
    return HostStep(sessions, sampling, in_turn, p50, p99, copies, events, tokens, watched)


def _check(engine: Engine, plan: HostPlan, in_turn: bool, watched: int) -> None:
    """Raise `NotAsMeant` unless the steps were replayed, and launched when they were meant to be."""
    [answer] = engine.handle(Inspect(Ticket(0)))
    assert isinstance(answer, Done)
    assert isinstance(answer.value, MemoryMap)
    steps, wanted = answer.value.steps, plan.steps
    replayed = steps.in_runs if watched else steps.replayed
    if replayed < wanted or (steps.followed > 0 if in_turn else steps.followed < wanted):
        raise NotAsMeant(f"of {wanted} steps {replayed} were replayed, and {steps.followed} launched ahead")


SESSIONS = (1, 32, 128)
FULL, QUICK = HostPlan(1024, 2000, 200), HostPlan(1024, 100, 20)
MOST_MS = Target(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRun(Record):
    """The record of a run."""

    plan: HostPlan
    steps: list[HostStep]
    other_cpu_share: float


def measure_steps(plan: HostPlan) -> list[HostStep]:
    """All numbers of sessions and ways to choose, launched ahead; greedy in turn; and with one row of many edited."""
    ahead = [measure_step(count, sampling, plan, in_turn=False) for count in SESSIONS for sampling in SAMPLINGS]
    in_turn = [measure_step(count, "greedy", plan, in_turn=True) for count in SESSIONS]
    return [*ahead, *in_turn, measure_step(SESSIONS[-1], "greedy", plan, in_turn=True, watched=1)]


def tables_of(steps: list[HostStep]) -> list[Table]:
    """The target, and every step."""
    rows: list[Row] = [
        {
            "sessions": each.sessions,
            "tokens are": each.sampling,
            "launched": ("in turn" if each.in_turn else "ahead") + ", a row edited" * bool(each.watched),
            "p50, µs": round(each.p50_us),
            "p99, µs": round(each.p99_us),
            "copies": each.copies,
            "events": each.events,
        }
        for each in steps
    ]
    note = (
        "CPU time of the engine's thread. Ahead: while the step before seems to run, as beside a GPU. A row that is "
        "edited half-way up the layers cuts the graphs of all."
    )
    [judged] = [s for s in steps if (s.sessions, s.sampling, s.in_turn) == (SESSIONS[-1], "greedy", False)]
    most = exact(f"The host, greedy step of {SESSIONS[-1]} sessions, ahead", "ms", judged.p50_us / 1e3, MOST_MS)
    return [figure_table("Target", [most]), Table("The host, with a device that takes no time", rows, note)]


def main() -> int:
    """Run it as the command line asks; returns the process's exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks.host", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps; writes no file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for results")
    arguments = parser.parse_args()
    console, plan = Console(), QUICK if arguments.quick else FULL
    meter = CpuMeter(bind_to_cores(2), time.process_time)
    torch.set_num_threads(1)
    with console.status("the host, with a device that takes no time"):
        steps = measure_steps(plan)
    run = HostRun(model=MODEL, plan=plan, steps=steps, other_cpu_share=meter.other_share())
    tables = tables_of(steps)
    console.print(f"on {run.place_and_time}", highlight=False)
    console.print(to_rich(tables))
    if run.other_cpu_share > DISTURBED_SHARE:
        console.print(f"disturbed: other processes had {run.other_cpu_share:.0%} of the cores")
    if not arguments.quick:
        heading = f"# The host's part of a decode step: on {run.place_and_time}\n\n"
        text = heading + "\n".join(map(to_markdown, tables))
        console.print(f"written: {write_run(arguments.output, 'host-', run, text)}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
