"""What the experiment does and sees: turns that pause, that are steered, what a pause costs their client, and what
others notice of it. A turn that pauses in every pass must say what it says without; a steered one says something else
at some token.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from client import AsyncSession, MemoryMap, Turn
from loadgen.errors import LoadgenError, require_at_least
from loadgen.experiments.base import Bench, Found
from loadgen.load.clocks import Stopwatch
from loadgen.load.prompts import TokenIds
from loadgen.plans import option
from loadgen.targets.djinn import Bucket, Subject, greedy


@dataclass(frozen=True, slots=True)
class WhiteboxPlan:
    """How much is measured.

    In each of `layers` (empty: a quarter, half and three quarters of the way up), `sequences` prompts of `context`
    tokens are answered with `tokens` tokens. Steering multiplies by `scale`. `others` sessions decode while one is
    paused for `pause_seconds`, `repeats` times with and without it.

    Raises `LoadgenError` if a value is outside its range.
    """

    layers: tuple[int, ...] = option(
        (), "where to pause and to steer (default: a quarter, half and three quarters of the way up)"
    )
    sequences: int = option(10, "prompts for each layer")
    tokens: int = option(64, "tokens generated for each prompt")
    context: int = option(64, "tokens of each prompt")
    scale: float = option(0.9, "what steering multiplies by")
    others: int = option(16, "sessions that decode next to a paused one")
    pause_seconds: float = option(10.0, "how long they are watched")
    repeats: int = option(3, "how often, with and without the paused session")
    seed: int = option(0, "of texts")

    def __post_init__(self) -> None:
        require_at_least(1, self, "sequences", "context", "others", "repeats")
        if self.tokens < 2:
            raise LoadgenError("tokens must be at least 2: one comes from the prompt, the others are decoded")
        require_at_least(0, self, "seed")
        if not 0 < self.pause_seconds < math.inf:
            raise LoadgenError("pause_seconds must be above 0 and finite")
        if not math.isfinite(self.scale):
            raise LoadgenError("scale must be finite")
        if min(self.layers, default=0) < 0 or len(set(self.layers)) < len(self.layers):
            raise LoadgenError("layers must be different numbers from 0")

    def prompts(self, layers: int) -> int:
        """How many prompts the experiment needs with so many layers."""
        return max(layers * self.sequences, self.others)


@dataclass(frozen=True, slots=True)
class Trial:
    """A prompt answered with a pause after `layer` in every pass, and again without: `paused` and `plain`.

    `prefill_pauses` and `decode_pauses` count the passes that paused.
    """

    layer: int
    sequence: int
    plain: TokenIds
    paused: TokenIds
    prefill_pauses: int
    decode_pauses: int

    @property
    def matching(self) -> int:
        """How many tokens are the same."""
        return sum(one == other for one, other in zip(self.plain, self.paused, strict=False))

    @property
    def paused_everywhere(self) -> bool:
        """Whether the prompt paused, and every token but the first, which comes from the prompt."""
        return self.prefill_pauses > 0 and self.decode_pauses == len(self.paused) - 1


class Waited(StrEnum):
    """What was waited for."""

    RESUME = "resume to the next pause"
    """With all layers once, and so one token, in between."""
    TOKEN = "a token without pauses"
    READ = "read the activation"
    WRITE = "write it back"
    SAVED = "engine: put a checkpoint aside"
    """As the server tells it of each pause."""


@dataclass(frozen=True, slots=True)
class Wait:
    """`positions` is how many the checkpoint had, 1 where there was none."""

    waited: Waited
    positions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Steered:
    """A prompt answered under steering; `differs_at` is the first token that is another, None if all are the same."""

    layer: int
    sequence: int
    differs_at: int | None


@dataclass(frozen=True, slots=True)
class Window:
    """What all the others decoded together: `tokens` in each second, and their rate.

    `paused`: whether a session was paused meanwhile, and `undisturbed` whether it then said what it says otherwise.
    """

    repeat: int
    paused: bool
    tokens: tuple[int, ...]
    tokens_per_s: float
    undisturbed: bool = True


@dataclass(slots=True)
class Seen:
    """Everything seen of one target, in order of time. `memory` is the server's map `before`, `during` a pause and
    `after`, `histograms` are the server's own, of this run.
    """

    trials: list[Trial] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    steered: list[Steered] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    memory: dict[str, MemoryMap] = field(default_factory=dict)
    histograms: dict[str, list[Bucket]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """A server that has answered, with all that its parts need."""

    bench: Bench[WhiteboxPlan]
    layers: tuple[int, ...]
    prompts: tuple[TokenIds, ...]
    found: Found
    seen: Seen = field(default_factory=Seen)

    @property
    def subject(self) -> Subject:
        """The server."""
        return self.bench.subject

    @property
    def plan(self) -> WhiteboxPlan:
        """How much is measured."""
        return self.bench.plan

    @property
    def middle_layer(self) -> int:
        """The one layer of the parts that measure speed."""
        return self.layers[len(self.layers) // 2]


async def run_trials(stage: Stage, advance: Callable[[], None]) -> None:
    """Answer `plan.sequences` prompts for each layer, with pauses and without.

    Every trial has a prompt of its own, and its paused turn comes first: the whole prompt is then computed under
    breakpoints, and not taken from the prefix cache.
    """
    subject, plan, seen = stage.subject, stage.plan, stage.seen
    for index, layer in enumerate(stage.layers):
        for sequence in range(plan.sequences):
            prompt = stage.prompts[index * plan.sequences + sequence]
            turn, pauses = await _answer_with_pauses(subject, prompt, plan.tokens, layer, seen)
            plain = await _answer_without(subject, prompt, plan.tokens, seen)
            trial = Trial(layer, sequence, plain, turn.token_ids, pauses["prefill"], pauses["decode"])
            seen.trials.append(trial)
            advance()


async def _answer_with_pauses(
    subject: Subject, prompt: TokenIds, tokens: int, layer: int, seen: Seen
) -> tuple[Turn, Counter[str]]:
    """The turn, and how many passes of each kind paused."""
    pauses: Counter[str] = Counter()
    async with subject.session() as session:
        await session.break_at(layer=layer)
        turn = await session.generate(**greedy(prompt, tokens))
        while (checkpoint := turn.checkpoint) is not None:
            pauses[checkpoint.in_pass] += 1
            positions = checkpoint.end - checkpoint.first
            seen.waits.append(Wait(Waited.SAVED, positions, checkpoint.saved_ms / 1000))
            if checkpoint.in_pass == "prefill":
                await _read_and_write(session, seen)
            watch = Stopwatch()
            turn = await session.resume()
            if turn.checkpoint is not None:
                seen.waits.append(Wait(Waited.RESUME, positions, watch.lap()))
    return turn, pauses


async def _read_and_write(session: AsyncSession, seen: Seen) -> None:
    """Fetch what is there and put it back as it is: the answer must not notice."""
    checkpoint = await session.checkpoint()
    watch = Stopwatch()
    activation = await checkpoint.read()
    seen.waits.append(Wait(Waited.READ, len(activation), watch.lap()))
    await checkpoint.write(activation)
    seen.waits.append(Wait(Waited.WRITE, len(activation), watch.lap()))


async def _answer_without(subject: Subject, prompt: TokenIds, tokens: int, seen: Seen) -> TokenIds:
    async with subject.session() as session, session.stream(**greedy(prompt, tokens)) as stream:
        watch = None
        async for event in stream:
            if watch is not None and event.token_ids:
                seconds = watch.lap() / len(event.token_ids)
                seen.waits += len(event.token_ids) * [Wait(Waited.TOKEN, 1, seconds)]
            watch = watch or Stopwatch()
    return stream.turn.token_ids


async def run_steered(stage: Stage, advance: Callable[[], None]) -> None:
    """Answer the prompts of the first layer's trials once more for each layer, multiplied there by `plan.scale`."""
    subject, plan = stage.subject, stage.plan
    plain = [await subject.answer(prompt, plan.tokens) for prompt in stage.prompts[: plan.sequences]]
    for layer in stage.layers:
        for sequence, expected in enumerate(plain):
            async with subject.session() as session:
                await session.steer(layer=layer, scale=plan.scale)
                turn = await session.generate(**greedy(stage.prompts[sequence], plan.tokens))
            stage.seen.steered.append(Steered(layer, sequence, first_difference(expected, turn.token_ids)))
            advance()


def first_difference(expected: TokenIds, found: TokenIds) -> int | None:
    """Where the two part, None if they are the same."""
    if expected == found:
        return None
    same = (one == other for one, other in zip(expected, found, strict=False))
    return next((place for place, equal in enumerate(same) if not equal), min(len(expected), len(found)))


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
