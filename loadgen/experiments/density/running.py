"""One run of a trace on one target that is up: the agents, and what is written down of them."""

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from client import ConnectionLost, DjinnError, RateLimited, ServerError, Timeout
from loadgen.errors import LoadgenError
from loadgen.load.clocks import TurnClock
from loadgen.load.prompts import Corpus, TokenIds, cut_prompts
from loadgen.load.records import Failure, Run, SignalRecord, TurnRecord
from loadgen.load.trace import AgentPlan, Trace, TurnPlan, final_tokens
from loadgen.load.workload import Measurement, Replay, Workload
from loadgen.sampling import sampling
from loadgen.targets import Agent, MakesAgents, Target, TargetSpec, connect
from loadgen.targets.base import Access

T = TypeVar("T")
OnChange = Callable[[Run, Collection[TurnClock]], None]
"""Told of a run that has changed, with the clocks of the turns that are in flight, which go on."""
Prompts = Sequence[Sequence[TokenIds]]
CLOSE_TIMEOUT_S = 10.0
COME_BACK_S = 0.1
"""How long before its next turn an agent says that it comes back."""
ILL = (Timeout, ConnectionLost, ServerError, RateLimited)
"""Errors of a server that is there and not well, which is a result. All others mean that the command is wrong."""


class WrongTokenCount(DjinnError):
    """The server generated fewer or more tokens than asked for, or showed none: the turn cannot be compared."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every target gets, and how it is measured."""

    load: Workload | Replay
    trace: Trace
    corpus: Corpus
    measurement: Measurement


@dataclass(slots=True)
class Attempt:
    """One run of one target, with what its agents said; `spec` is None of a target that did not come up.

    It is filled in as the run goes on: what ends it early costs nothing of what has been seen.
    """

    spec: TargetSpec | None
    prompts: Prompts = ()
    run: Run = field(default_factory=Run)

    @property
    def has_run(self) -> bool:
        """Whether the load was on the target, to its end or not."""
        return self.run.duration_s > 0


class Runner:
    """One run of the agents of `target`.

    `execute` it once. `on_change` is called at the start, and after each turn that completed or failed. A turn or a
    signal that takes longer than `turn_timeout_s` has failed.
    """

    def __init__(self, target: MakesAgents, on_change: OnChange, turn_timeout_s: float = math.inf) -> None:
        self._target = target
        self._on_change = on_change
        self._turn_timeout_s = turn_timeout_s
        self._run = Run()
        self._in_flight: set[TurnClock] = set()
        self._started = 0.0

    async def execute(self, trace: Trace, prompts: Prompts) -> Run:
        """Run every agent to its end, with `prompts` as what each adds in each of its turns.

        If it is cancelled, it ends its agents and returns what it has.
        """
        agents = [self._target.new_agent() for _ in trace]
        self._started = time.perf_counter()
        self._changed()
        try:
            async with asyncio.TaskGroup() as lives:
                for number, (agent, plan, own_prompts) in enumerate(zip(agents, trace, prompts, strict=True)):
                    lives.create_task(self._live(agent, number, plan, own_prompts))
        except asyncio.CancelledError:
            self._run.interrupted = True
        self._run.duration_s = self._now()
        return self._run

    async def _live(self, agent: Agent, number: int, plan: AgentPlan, prompts: Sequence[TokenIds]) -> None:
        """One agent to its end. A turn that fails is its last: later ones would lack the context that it adds."""
        due_s = plan.arrival_s
        try:
            for turn, (planned, new_ids) in enumerate(zip(plan.turns, prompts, strict=True)):
                await asyncio.sleep(due_s - self._now())
                record = await self._run_turn(agent, number, turn, due_s, planned, new_ids)
                if record is None or planned.think_s is None:
                    break
                due_s = record.over_s + planned.think_s
                announced_s = None if planned.announced_s is None else record.over_s + planned.announced_s
                await self._announce(agent, number, due_s, announced_s)
        finally:
            try:
                await within(CLOSE_TIMEOUT_S, agent.close())
            except DjinnError as error:
                self._fail(number, None, error)

    async def _announce(self, agent: Agent, number: int, due_s: float, announced_s: float | None) -> None:
        """Tell the server that the agent comes back at `announced_s`, and shortly before `due_s` that it does."""
        away_s = None if announced_s is None else max(0.0, announced_s - self._now())
        await self._signal(agent.leave(away_s), number)
        await asyncio.sleep(due_s - COME_BACK_S - self._now())
        await self._signal(agent.come_back(), number)

    async def _signal(self, told: Awaitable[str | None], number: int) -> None:
        sent_s = self._now()
        try:
            phase = await within(self._turn_timeout_s, told)
        except DjinnError as error:
            self._fail(number, None, error)
            return
        if phase is not None:
            self._run.signals.append(SignalRecord(number, phase, sent_s, self._now() - sent_s))

    async def _run_turn(
        self, agent: Agent, number: int, turn: int, due_s: float, planned: TurnPlan, new_ids: TokenIds
    ) -> TurnRecord | None:
        """Run and record one turn; None if it did not complete."""
        clock = TurnClock()
        self._in_flight.add(clock)
        try:
            cost = await within(self._turn_timeout_s, agent.run_turn(new_ids, planned.completion_tokens, clock))
            if agent.is_exact and cost.completion_tokens != planned.completion_tokens:
                raise WrongTokenCount(f"{cost.completion_tokens} tokens instead of {planned.completion_tokens}")
            if not clock.token_times_s:
                raise WrongTokenCount("the turn ended without an event that had tokens")
        except DjinnError as error:
            self._in_flight.discard(clock)
            self._fail(number, turn, error)
            return None
        self._in_flight.discard(clock)
        sent_s, token_times_s = clock.started - self._started, tuple(clock.token_times_s)
        record = TurnRecord(number, turn, due_s, sent_s, token_times_s, clock.over_s, cost, planned.tool)
        self._run.turns.append(record)
        self._changed()
        return record

    def _fail(self, number: int, turn: int | None, error: DjinnError) -> None:
        self._run.failures.append(Failure(number, turn, self._now(), type(error).__name__, error.message))
        self._changed()

    def _changed(self) -> None:
        self._on_change(self._run, self._in_flight)

    def _now(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self._started


async def within(seconds: float, answer: Awaitable[T]) -> T:
    """The answer. Raises `Timeout` if it does not come in time."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise Timeout(f"no answer within {seconds:g} s") from None


@asynccontextmanager
async def connected(spec: TargetSpec, plan: Plan) -> AsyncIterator[Target]:
    """A target that has room for the longest history. Raises `LoadgenError` and `client.DjinnError`."""
    target = connect(replace(spec, timeout_s=plan.measurement.turn_timeout_s), plan.load.signals)
    try:
        await target.prepare(final_tokens(plan.trace))
        yield target
    finally:
        await target.close()


async def measure(attempt: Attempt, spec: TargetSpec, plan: Plan, repeat: int, on_change: OnChange) -> None:
    """Run the trace once, as `attempt`. Raises `LoadgenError` and `client.DjinnError` if it cannot even begin.

    `on_change` is called with the run as it goes on.
    """
    async with connected(spec, plan) as target:
        trace = (*plan.trace, _spare(plan.trace))
        *attempt.prompts, spare = await cut_prompts(trace, plan.load, plan.corpus, target.tokenize, repeat)
        failures = await _warm_up(target, trace[-1], spare[0], plan.measurement.turn_timeout_s)
        with few_collections():
            async with sampling(spec) as sampler:

                def changed(run: Run, in_flight: Collection[TurnClock]) -> None:
                    run.samples = sampler.samples
                    on_change(run, in_flight)

                runner = Runner(target, changed, plan.measurement.turn_timeout_s)
                attempt.run = await runner.execute(plan.trace, attempt.prompts)
                attempt.run.samples = sampler.samples
                attempt.run.failures[:0] = failures
            attempt.run.totals = sampler.totals


def _spare(trace: Trace) -> AgentPlan:
    """An agent too many that does the first turn of the first agent."""
    return AgentPlan(0.0, (replace(trace[0].turns[0], think_s=None, announced_s=None),))


async def _warm_up(target: Target, plan: AgentPlan, prompt: TokenIds, timeout_s: float) -> list[Failure]:
    """Run one turn before the clock starts: what is slow only once stays out of the measurement. Its failures."""
    agent = target.new_agent()
    try:
        try:
            await within(timeout_s, agent.run_turn(prompt, plan.turns[0].completion_tokens, TurnClock()))
        finally:
            await within(CLOSE_TIMEOUT_S, agent.close())
    except DjinnError as error:
        return [Failure(None, None, 0.0, type(error).__name__, error.message)]
    return []


@contextmanager
def few_collections() -> Iterator[None]:
    """Keep the garbage collector off everything that is there already: to go through it holds up every event."""
    is_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:  # else all would be thawed, with what somebody else has frozen
            gc.unfreeze()


async def check_running(targets: Sequence[Access], plan: Plan) -> None:
    """Raise `LoadgenError` if one of the targets that are up cannot serve the load; a server may be ill."""
    for target in targets:
        if target.running is not None:
            try:
                async with connected(target.running, plan):
                    pass
            except ILL:
                continue
            except DjinnError as error:
                raise unusable(target.name, error) from error


def unusable(name: str, error: DjinnError | LoadgenError) -> LoadgenError:
    """The error that ends the command, because the target of that name cannot be measured."""
    if isinstance(error, LoadgenError):
        return error
    return LoadgenError(f"measuring target {name} failed: {error}")
