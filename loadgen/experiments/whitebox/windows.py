"""What others notice of a session that is paused."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from loadgen.experiments.whitebox.plan import Stage, Window
from loadgen.load.prompts import TokenIds
from loadgen.targets.subject import Subject, greedy

PAUSE_MARGIN_S = 600.0
"""How much longer than its window a pause may last: the others need time to begin."""


@dataclass(slots=True)
class _Span:
    """One session's events from `first` to `last`; `tokens` are those after the first."""

    first: float
    last: float
    tokens: int = 0


class TokenMeter:
    """Counts what `sessions` sessions say in `seconds` from `start` on.

    `ready` is set once all have spoken, `over` once all have spoken after the end. Tokens come in steps, all sessions
    at once: a session's time is counted from event to event, so that no part of a step is.
    """

    def __init__(self, sessions: int, seconds: float) -> None:
        self.ready = asyncio.Event()
        self.over = asyncio.Event()
        self._seconds = seconds
        self._silent = set(range(sessions))
        self._going = set(range(sessions))
        self._started: float | None = None
        self._spans: dict[int, _Span] = {}
        self._counts: Counter[int] = Counter()

    def start(self) -> None:
        """Count from now on."""
        self._started = time.perf_counter()

    def tokens(self, session: int, count: int) -> None:
        """A session has said `count` more."""
        self._silent.discard(session)
        if not self._silent:
            self.ready.set()
        if self._started is not None and session in self._going:
            self._count(session, count, time.perf_counter(), self._started)

    def _count(self, session: int, count: int, now: float, started: float) -> None:
        span = self._spans.setdefault(session, _Span(now, now))
        if now > span.first:
            span.last = now
            span.tokens += count
        if now < started + self._seconds:
            self._counts[int(now - started)] += count
        elif span.tokens:
            self._going.discard(session)
        if not self._going:
            self.over.set()

    @property
    def tokens_per_s(self) -> float:
        """Of all sessions together, once it is over."""
        return sum(span.tokens / (span.last - span.first) for span in self._spans.values())

    @property
    def by_second(self) -> tuple[int, ...]:
        """How many tokens came in each second that is whole."""
        return tuple(self._counts[second] for second in range(int(self._seconds)))


async def measure_windows(stage: Stage, advance: Callable[[], None]) -> None:
    """Let `plan.others` sessions decode, `plan.repeats` times with one paused and without, in turns the other first."""
    plain = await stage.subject.answer(stage.prompts[0], stage.plan.tokens)
    for repeat in range(stage.plan.repeats):
        for paused in (False, True) if repeat % 2 == 0 else (True, False):
            if paused:
                window = await _with_one_paused(stage, plain, repeat)
            else:
                meter = await _decode(stage)
                window = Window(repeat, False, meter.by_second, meter.tokens_per_s)
            stage.seen.windows.append(window)
            advance()


async def _with_one_paused(stage: Stage, plain: TokenIds, repeat: int) -> Window:
    """One window, with a look at memory before it ends; the pause ends with it."""
    subject, plan = stage.subject, stage.plan
    async with subject.session() as session:
        await session.break_at(layer=stage.middle_layer, timeout_s=plan.pause_seconds + PAUSE_MARGIN_S)
        paused = await session.generate(**greedy(stage.prompts[0], plan.tokens))
        stage.seen.memory["during"] = await subject.memory()
        meter = await _decode(stage)
        turn = await session.resume(until="end")
    undisturbed = paused.status == "paused" and turn.token_ids == plain
    return Window(repeat, True, meter.by_second, meter.tokens_per_s, undisturbed)


async def _decode(stage: Stage) -> TokenMeter:
    """Let the others decode for `plan.pause_seconds`; returns what was counted."""
    plan = stage.plan
    meter = TokenMeter(plan.others, plan.pause_seconds)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_keep_decoding(stage.subject, number, prompt, meter))
                for number, prompt in enumerate(stage.prompts[: plan.others])
            ]
            await meter.ready.wait()
            meter.start()
            await meter.over.wait()
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return meter


async def _keep_decoding(subject: Subject, number: int, prompt: TokenIds, meter: TokenMeter) -> None:
    """Fill one session's context after another, until cancelled."""
    while True:
        async with subject.session() as session, session.stream(**greedy(prompt)) as stream:
            async for event in stream:
                if event.token_ids:
                    meter.tokens(number, len(event.token_ids))
