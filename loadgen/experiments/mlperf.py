"""`python -m loadgen mlperf`: conversations of agents as MLPerf's client replays them, against servers of chats, with
one number of conversations at a time or with several, one after the other.

More conversations have more KV. Where a server's caches hold it no more, it computes again what it had: the curves
fall.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from client import DjinnError
from client.calls import Call
from client.edge import mapped_errors
from client.errors import StreamBroken
from loadgen.errors import LoadgenError, require_at_least
from loadgen.load.clocks import TurnClock, Wire
from loadgen.load.forms import read_recorded, small_trace
from loadgen.load.records import Failure, Run, TurnCost, TurnRecord, taken
from loadgen.load.trajectories import Message, Trajectory, Turn
from loadgen.load.workload import Measurement
from loadgen.options.common import add_output, finish, make_output
from loadgen.options.parser import add_plan_options, read_plan
from loadgen.options.targets import add_targets, read_targets
from loadgen.plans import option
from loadgen.report.origin import Server
from loadgen.report.report import Chart, Report, noting
from loadgen.report.report import Failure as Unmeasured
from loadgen.report.tables import Figure, Row, Table, all_of, exact
from loadgen.stats import Distribution, Summary, summarize
from loadgen.targets import TargetSpec
from loadgen.targets.base import MODELS, Access, check_context
from loadgen.targets.openai import CompletionEnd, read_chunk
from loadgen.targets.tools import SESSION_HEADER

LEVELS, CALLS, AT_ONCE = "Conversations at a time", "calls", "at once"


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How the conversations are replayed. Raises `LoadgenError` if a value is outside its range."""

    concurrency: tuple[int, ...] = option((1,), "conversations at a time; several are measured one after the other")
    trajectories: int | None = option(None, "conversations of each (default: all of the trace once)", read=int)
    seconds: float = option(math.inf, "after which each ends; what is under way then does not count")
    calls: int = option(1000, "calls of a conversation at most")
    fit: int | None = option(None, "tokens of a conversation at most: texts are shortened (default: no)", read=int)
    characters_per_token: float = option(2.5, "with which --fit reckons")
    delay_scale: float = option(1.0, "factor on recorded delays and arrivals; 0: none")
    max_tokens: int = option(1024, "most in an answer")
    turn_timeout_s: float = option(600.0, "seconds for an answer")
    exact: bool = option(False, "answers have all of --max-tokens, whatever the model says")
    plain: bool = option(False, "offer no tools; calls and results are text")
    salt: bool = option(False, "conversations share no prefix; always so with several concurrencies")
    preserve_thinking: bool = option(False, "earlier thoughts stay in the prompt")

    def __post_init__(self) -> None:
        if min(self.concurrency, default=0) < 1 or len(set(self.concurrency)) < len(self.concurrency):
            raise LoadgenError("concurrency must be at least 1, and different numbers")
        require_at_least(1, self, "calls", "max_tokens")
        for name in ("trajectories", "fit"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise LoadgenError(f"{name} must be at least 1")
        if not (0 <= self.delay_scale < math.inf and min(self.seconds, self.turn_timeout_s) > 0):
            raise LoadgenError("delay_scale must be from 0 on and finite, and seconds and turn_timeout_s above 0")
        if not 0 < self.characters_per_token < math.inf:
            raise LoadgenError("characters_per_token must be above 0 and finite")

    def of(self, trajectory: Trajectory) -> Trajectory:
        """The conversation as it is replayed."""
        found = trajectory.plain() if self.plain else trajectory
        room = math.inf if self.fit is None else (self.fit - self.max_tokens) * self.characters_per_token
        if room <= 0:
            raise LoadgenError(f"fit must be above max_tokens, which is {self.max_tokens}")
        return found.shortened(self.calls, room)

    def level(self, trajectories: Sequence[Trajectory], number: int) -> Iterator[tuple[str, Trajectory]]:
        """The conversations of level `number` under their names: more than there are repeat."""
        endless = math.isfinite(self.seconds) and self.trajectories is None
        count = None if endless else self.trajectories or len(trajectories)
        for place, trajectory in enumerate(islice(cycle(trajectories), count)):
            repeat = place // len(trajectories) + 1
            name = trajectory.id if repeat == 1 else f"{trajectory.id}__repeat_{repeat}"
            if len(self.concurrency) > 1:
                name = f"{name}__level_{number}"
            salted = self.salt or len(self.concurrency) > 1
            yield name, trajectory.salted(f"{repeat}.{number}") if salted else trajectory


class _Choice(BaseModel):
    delta: dict[str, Any]


class _Chunk(BaseModel):
    choices: tuple[_Choice, ...] = ()


class Replay:
    """One run of trajectories against a server, `concurrency` at a time."""

    def __init__(self, spec: TargetSpec, model: str, plan: ReplayPlan, concurrency: int) -> None:
        self._spec, self._model, self._plan, self._concurrency = spec, model, plan, concurrency
        self._began = 0.0
        self.run, self.planned = Run(), 0

    async def execute(self, trajectories: Iterator[tuple[str, Trajectory]]) -> None:
        """Replay the trajectories, each under its name."""
        named = enumerate(trajectories)
        self._began = time.perf_counter()
        workers = [asyncio.create_task(self._work(named)) for _ in range(self._concurrency)]
        try:
            await asyncio.wait(workers, timeout=None if math.isinf(self._plan.seconds) else self._plan.seconds)
        finally:
            self.run.duration_s = time.perf_counter() - self._began
            for worker in workers:
                worker.cancel()
            ends = await asyncio.gather(*workers, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _work(self, trajectories: Iterator[tuple[int, tuple[str, Trajectory]]]) -> None:
        for place, (name, trajectory) in trajectories:  # the workers take from one iterator
            wire, messages = Wire(), list[Message]()
            transport = self._spec.transport(wire.trace)
            await asyncio.sleep(self._began + trajectory.starts_s * self._plan.delay_scale - time.perf_counter())
            self.planned += len(trajectory.turns)
            for number, turn in enumerate(trajectory.turns):
                due_s = time.perf_counter() - self._began + turn.delay_s * self._plan.delay_scale
                await asyncio.sleep(turn.delay_s * self._plan.delay_scale)
                messages += turn.new
                wire.clock = clock = TurnClock()
                call = self._call(name, trajectory, turn, messages)
                try:
                    async with asyncio.timeout(self._plan.turn_timeout_s), transport.stream(call) as source:
                        cost = await _read(source, clock)
                except (DjinnError, TimeoutError) as error:
                    says = f"{name}, call {number + 1}: {str(error) or 'no answer in time'}"
                    at_s = time.perf_counter() - self._began
                    self.run.failures.append(Failure(place, number, at_s, type(error).__name__, says))
                    break
                times, sent_s = tuple(clock.token_times_s), clock.started - self._began
                self.run.turns.append(TurnRecord(place, number, due_s, sent_s, times, clock.over_s, cost))
            await transport.close()

    def _call(self, name: str, trajectory: Trajectory, turn: Turn, messages: list[Message]) -> Call[bytes]:
        most = self._plan.max_tokens if self._plan.exact else turn.max_tokens or self._plan.max_tokens
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "temperature": 0,
            "max_completion_tokens": most,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if trajectory.tools:
            body["tools"] = trajectory.tools
        if self._plan.exact:
            body["ignore_eos"] = True
        if self._plan.preserve_thinking:
            body["chat_template_kwargs"] = {"preserve_thinking": True}
        return Call("POST", "/v1/chat/completions", bytes, json=body, headers={SESSION_HEADER: name})


async def _read(source: Any, clock: TurnClock) -> TurnCost:
    end = CompletionEnd()
    with mapped_errors(lost=StreamBroken):
        async with aclosing(source.aiter_sse()) as events:
            async for event in events:
                if not end.feed(event) and any(
                    any(value for name, value in choice.delta.items() if name != "role")
                    for choice in read_chunk(event, _Chunk).choices
                ):
                    clock.tokens()
    clock.over()
    cost = end.cost()
    if not clock.token_times_s:
        clock.token_times_s.append(clock.over_s)
    return cost


@dataclass(slots=True)
class Level:
    """What was seen of a target with so many conversations at a time."""

    target: str
    at_once: int
    replay: Replay

    @property
    def summary(self) -> Summary:
        """In few numbers."""
        return summarize([self.replay.run], self.replay.planned, Measurement())

    def row(self) -> Row:
        """The same as a row."""
        found, run = self.summary, self.replay.run
        first = Distribution.of(turn.ttft_s for turn in run.turns)
        return {
            "target": self.target,
            AT_ONCE: self.at_once,
            "calls": found.turns_completed,
            "failed": found.turns_failed,
            "first token p50, s": None if first is None else first.p50,
            "first token p95, s": None if first is None else first.p95,
            "tokens/s of an answer": None if found.tpot_s is None or not found.tpot_s.p50 else 1 / found.tpot_s.p50,
            "tokens/s of all": found.tokens_per_s,
            "calls a minute": 60 * found.turns_per_s,
            "prompt tokens cached, %": found.cached_percent,
            "prompt tokens": found.prompt_tokens,
            "seconds": found.duration_s,
        }


@dataclass(slots=True)
class Found:
    """What was seen of all targets."""

    levels: list[Level] = field(default_factory=list)
    specs: list[TargetSpec] = field(default_factory=list)
    failures: list[Unmeasured] = field(default_factory=list)
    interrupted: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """The servers, the trace, and how it is replayed."""
    add_targets(parser, openai=True)
    add_output(parser)
    forms = "MLPerf's, Mooncake's or TraceLab's JSON lines, or conversations (default: a small trace of eight agents)"
    parser.add_argument("--dataset", type=Path, metavar="FILE", help=f"the trace: {forms}")
    add_plan_options(parser, ReplayPlan)


def run(options: argparse.Namespace, progress: Console) -> int:
    """Replay it and print the figures; returns the exit code. Raises `LoadgenError`."""
    plan = read_plan(options, ReplayPlan)
    trace, per_token = options.dataset, plan.characters_per_token
    trajectories = [plan.of(each) for each in (small_trace() if trace is None else read_recorded(trace, per_token))]
    if plan.salt or len(plan.concurrency) > 1:
        for each in trajectories:
            each.salted("")
    targets = read_targets(options, context_tokens=plan.fit)
    make_output(options)
    found = asyncio.run(replay_all(targets, trajectories, plan, progress))
    return finish(_report("the small trace" if trace is None else trace.name, trajectories, plan, found), options)


async def replay_all(
    targets: Sequence[Access], trajectories: Sequence[Trajectory], plan: ReplayPlan, progress: Console
) -> Found:
    """Target after target, each with all numbers of conversations. What stands in the way of one costs nothing of the
    others. Cancelled, it returns what it has. Raises `LoadgenError` if no target can be measured.
    """
    found = Found()
    try:
        for target in targets:
            with noting(target.name, found.failures):
                async with target.reach() as spec:
                    model = await _model(spec)
                    found.specs.append(spec)
                    for number, at_once in enumerate(plan.concurrency):
                        level = Level(target.name, at_once, Replay(spec, model, plan, at_once))
                        found.levels.append(level)
                        await level.replay.execute(plan.level(trajectories, number))
                        words = f"{level.summary.turns_completed} calls in {level.summary.duration_s:.0f} s"
                        progress.print(f"{target.name}, {at_once} at a time: {words}", markup=False, highlight=False)
    except asyncio.CancelledError:
        found.interrupted = True
    if found.failures and not found.levels:
        raise LoadgenError("; ".join(each.message for each in found.failures))
    return found


async def _model(spec: TargetSpec) -> str:
    """What to ask for: what the target names, or the first that the server has. Raises `LoadgenError`."""
    if spec.tools:
        raise LoadgenError(f"target {spec.name}: conversations have tools of their own: leave +tools out")
    transport = spec.transport()
    try:
        models = await transport.send(MODELS)
    except DjinnError as error:
        raise LoadgenError(f"target {spec.name}: {error.message}") from error
    finally:
        await transport.close()
    check_context(spec, models, 1)
    return spec.model or models[0].id


def _report(trace: str, trajectories: Sequence[Trajectory], plan: ReplayPlan, found: Found) -> Report:
    rows = [level.row() for level in found.levels]
    figures: list[Figure] = []
    for level, row in zip(found.levels, rows, strict=True):
        by, seen = {"target": level.target, AT_ONCE: f"{level.at_once}"}, level.summary
        figures.append(all_of("calls answered", seen.turns_completed, seen.turns_completed + seen.turns_failed, by))
        figures += [exact(name, "", each, by=by) for name, each in list(row.items())[4:10] if isinstance(each, float)]
    calls = sum(len(each.turns) for each in trajectories)
    fit = "" if plan.fit is None else f", with texts shortened to {plan.fit:,} tokens a conversation"
    return Report(
        experiment="mlperf",
        title="Recorded agents, replayed",
        lead=(
            f"{len(trajectories)} conversations of {trace} with {calls:,} calls{fit}. Closed loop; delays as recorded, "
            f"times {plan.delay_scale:g}; answers of at most {plan.max_tokens:,} tokens. What the model answers is not "
            "scored.",
        ),
        plan=asdict(replace(plan, seconds=min(plan.seconds, 1e9))),
        figures=tuple(figures),
        tables=(
            Table(
                LEVELS,
                rows,
                "First token: of all calls. Of an answer: one over the median time per token after its first.",
            ),
            Table(
                "What failed",
                [
                    {"target": each.target, AT_ONCE: each.at_once, "error": one.kind, "message": one.message}
                    for each in found.levels
                    for one in each.replay.run.failures
                ],
            ),
            Table(CALLS, [row for level in found.levels for row in _call_rows(level)], shown=False),
        ),
        charts=tuple(
            Chart(title, caption, "lines", LEVELS, AT_ONCE, column, "target", x_label="conversations at a time", **more)
            for title, caption, column, more in (
                ("First token", "p95 of all calls.", "first token p95, s", {"y_label": "seconds", "log_y": True}),
                ("An answer's tokens", "Median of all calls.", "tokens/s of an answer", {"y_label": "tokens/s"}),
                ("All answers' tokens", "Of all conversations together.", "tokens/s of all", {"y_label": "tokens/s"}),
                ("Prompt tokens cached", "Of all that were sent.", "prompt tokens cached, %", {"y_label": "%"}),
            )
        ),
        servers=tuple(Server.of(spec) for spec in found.specs),
        failures=tuple(found.failures),
        interrupted=found.interrupted,
    )


def _call_rows(level: Level) -> Iterator[Row]:
    for turn in level.replay.run.turns:
        yield {
            "target": level.target,
            AT_ONCE: level.at_once,
            "conversation": turn.agent,
            "call": turn.turn,
            **taken(turn, "sent_s", "ttft_s", "tpot_s", "latency_s"),
            **taken(turn.cost, "prompt_tokens", "completion_tokens", "cached_tokens"),
        }
