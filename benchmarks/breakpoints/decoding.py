"""Sessions that decode alone, beside a paused one, with breakpoints that do not match, and steered."""

import random
import time
from dataclasses import dataclass

from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Pass, When
from benchmarks.breakpoints.engine import BenchEngine
from benchmarks.breakpoints.plan import BUSY_SESSIONS, PROMPT_TOKENS
from benchmarks.text import TokenSource
from loadgen.processes.process import ServerFailedError

WARM_UP_STEPS = 3
NEVER = 10**6
FACTOR = 0.9


@dataclass(frozen=True, slots=True)
class DecodeRound:
    """Tokens per second of `width` sessions, each kind once, in random order."""

    width: int
    plain: float
    beside_paused: float
    unmatched: float
    steered: float


class DecodeBench:
    """Sessions with the same prompts in every round, whose contexts have the same lengths whatever the kind."""

    def __init__(self, bench: BenchEngine, source: TokenSource, seed: int, steps: int) -> None:
        self._bench = bench
        self._random = random.Random(seed)
        self._steps = steps
        self._prompts = [source.take(PROMPT_TOKENS) for _ in range(BUSY_SESSIONS)]
        self._paused_prompt = source.take(PROMPT_TOKENS)
        layers = tuple(bench.num_layers * quarter // 4 for quarter in (1, 2, 3))
        self._stop = Breakpoint("stop", layers[:1], Action.PAUSE, When(Pass.DECODE))
        self._unmatched = (
            Breakpoint("position", layers, Action.PAUSE, When(Pass.DECODE, position=NEVER)),
            Breakpoint("every", layers, Action.CAPTURE, When(Pass.DECODE, every=NEVER)),
        )
        self._steering = (
            Breakpoint("steer", (bench.num_layers // 5,), Action.EDIT, edits=(Edit(EditOp.SCALE, FACTOR),)),
        )

    def run(self, width: int, rounds: int) -> list[DecodeRound]:
        """Rounds with `width` sessions, after one that is not kept: it leaves the prompts in the prefix cache."""
        return [self._round(width) for _ in range(rounds + 1)][1:]

    def _round(self, width: int) -> DecodeRound:
        kinds = {
            "plain": lambda: self._rate(width, ()),
            "beside_paused": lambda: self._rate_beside_paused(width),
            "unmatched": lambda: self._rate(width, self._unmatched),
            "steered": lambda: self._rate(width, self._steering),
        }
        order = self._random.sample(list(kinds), len(kinds))
        return DecodeRound(width, **{kind: kinds[kind]() for kind in order})

    def _rate_beside_paused(self, width: int) -> float:
        paused = self._bench.open([self._stop])
        self._bench.submit(paused, self._paused_prompt, 2)
        self._bench.pause(paused)
        rate = self._rate(width, ())
        self._bench.pause(paused)
        self._bench.close(paused)
        return rate

    def _rate(self, width: int, breakpoints: tuple[Breakpoint, ...]) -> float:
        bench = self._bench
        sessions = [bench.open(breakpoints) for _ in range(width)]
        for session, prompt in zip(sessions, self._prompts, strict=False):
            bench.submit(session, prompt, NEVER)
        while not all(bench.has_begun(session) for session in sessions):
            bench.step()
        for _ in range(WARM_UP_STEPS):
            bench.step()
        tokens, begin = bench.tokens, time.perf_counter()
        for _ in range(self._steps):
            bench.step()
        seconds = time.perf_counter() - begin
        generated = bench.tokens - tokens
        for session in sessions:
            bench.close(session)
        if generated != width * self._steps:
            raise ServerFailedError(f"{self._steps} steps of {width} sessions gave {generated} tokens")
        return generated / seconds
