"""What breakpoints cost sessions that decode, and how long one that pauses takes to leave the batch and to go on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from app.domain.breakpoints import NEXT_BREAKPOINT, Action, Breakpoint, Edit, EditOp, Pass, Until, When
from app.domain.values import SessionId
from app.messages import Paused
from benchmarks.engine.live import LiveEngine, LiveTurn, random_tokens
from benchmarks.engine.loading import WatchedStack
from loadgen.errors import NotAsMeant

NEVER = 10**6
FACTOR = 0.9
WARM_UP_TOKENS = 3
"""Of every turn, that are not counted: a step with another's prompt in it is no decode step."""


def decode_rate(turns: Sequence[LiveTurn]) -> float:
    """Tokens a second from the moment when every turn has had its first few tokens until the first turn ends. NaN if
    they never decode together, as in a first round, whose prompts take many steps.
    """
    begin = max(turn.times[WARM_UP_TOKENS - 1] for turn in turns)
    end = min(turn.times[-1] for turn in turns)
    if end <= begin:
        return math.nan
    counted = sum(1 for turn in turns for time in turn.times if begin < time <= end)
    return counted / (end - begin)


class DecodeBench:
    """`width` sessions of each kind with the same prompts of `prompt_tokens` tokens, whose contexts have the same
    lengths whatever the kind, and that decode `steps` tokens.
    """

    def __init__(self, live: LiveEngine, *, width: int, prompt_tokens: int, steps: int) -> None:
        self._live = live
        self._width = width
        self._steps = steps
        self._random = Random(0)
        self._prompts = [random_tokens(self._random, prompt_tokens) for _ in range(width + 1)]
        layers = tuple(sorted({live.info.num_layers * quarter // 4 for quarter in (1, 2, 3)}))
        self._stop = Breakpoint("stop", layers[:1], Action.PAUSE, When(Pass.DECODE))
        self._unmatched = (
            Breakpoint("position", layers, Action.PAUSE, When(Pass.DECODE, position=NEVER)),
            Breakpoint("every", layers, Action.CAPTURE, When(Pass.DECODE, every=NEVER)),
        )
        steered_after = (live.info.num_layers // 5,)
        self._steering = Breakpoint("steer", steered_after, Action.EDIT, edits=(Edit(EditOp.SCALE, FACTOR),))
        self._kinds: dict[str, Callable[[], float]] = {
            "plain": lambda: self._rate(self._open()),
            "again": lambda: self._rate(self._open()),
            "unarmed": lambda: self._rate(self._open_unarmed()),
            "unmatched": lambda: self._rate(self._open(*self._unmatched)),
            "beside_paused": self._rate_beside_paused,
            "beside_armed": lambda: self._rate([*self._open()[1:], self._live.open(self._unmatched)]),
            "steered": lambda: self._rate(self._open(self._steering)),
        }

    def round(self, *kinds: str) -> dict[str, float]:
        """Tokens a second of each of these kinds, once. The first round leaves the prompts in the prefix cache."""
        return {kind: self._kinds[kind]() for kind in self._random.sample(kinds, len(kinds))}

    def _open(self, *breakpoints: Breakpoint) -> list[SessionId]:
        return [self._live.open(breakpoints) for _ in range(self._width)]

    def _open_unarmed(self) -> list[SessionId]:
        """Sessions whose breakpoints have been taken again."""
        sessions = self._open(self._stop, *self._unmatched)
        for session in sessions:
            self._live.disarm(session)
        return sessions

    def _rate_beside_paused(self) -> float:
        paused = self._live.open([self._stop])
        self._live.generate(paused, self._prompts[-1], 2)
        rate = self._rate(self._open())
        self._live.close(paused)
        return rate

    def _rate(self, sessions: list[SessionId]) -> float:
        turns = [
            self._live.submit(session, prompt, self._steps)
            for session, prompt in zip(sessions, self._prompts, strict=False)
        ]
        self._live.finish(*turns)
        self._live.close(*sessions)
        return decode_rate(turns)


WARM_UP = 3


@dataclass(frozen=True, slots=True)
class PauseTimes:
    """Of one pause, in seconds: to leave the batch (save) and to carry out `Resume` (dispatch), as the engine says; and
    from the sending of `Resume` to an idle device until the next layer has its input (restore).
    """

    save_s: float
    dispatch_s: float
    restore_s: float


class PauseBench:
    """Pauses on an engine around a watched model. `prompt` gives so many tokens that no session has had."""

    def __init__(self, live: LiveEngine, watched: WatchedStack, prompt: Callable[[int], list[int]]) -> None:
        self._live = live
        self._watched = watched
        self._prompt = prompt

    def in_decode(self, count: int, prompt_tokens: int) -> list[PauseTimes]:
        """Pauses in the middle of the model at every generated token. Raises `NotAsMeant`."""
        stop = Breakpoint("middle", (self._live.info.num_layers // 2,), Action.PAUSE, When(Pass.DECODE))
        session, pauses = self._live.open([stop]), WARM_UP + count
        turn = self._live.generate(session, self._prompt(prompt_tokens), pauses + 2)
        times = []
        for _ in range(pauses):
            found, turn = self._go_on(session, turn, NEXT_BREAKPOINT, positions=1)
            times.append(found)
        self._live.close(session)
        return times[WARM_UP:]

    def in_prefill(self, count: int, prompt_tokens: int) -> list[PauseTimes]:
        """Pauses with a prompt of so many tokens, which is taken through the model layer by layer. Raises
        `NotAsMeant`.
        """
        times: list[PauseTimes] = []
        while len(times) <= count:
            session = self._live.open([Breakpoint("first", (0,), Action.PAUSE, When(Pass.PREFILL))])
            turn = self._live.generate(session, self._prompt(prompt_tokens))
            for layer in range(1, self._live.info.num_layers):
                found, turn = self._go_on(session, turn, Until(layer=layer), positions=prompt_tokens)
                times.append(found)
            self._live.close(session)
        return times[1 : 1 + count]  # the first is not kept: nothing shall be allocated or compiled under the clock

    def _go_on(self, session: SessionId, before: LiveTurn, until: Until, positions: int) -> tuple[PauseTimes, LiveTurn]:
        """Resume up to the next pause; what the pause cost, and the turn that is paused again."""
        left = _paused(before).checkpoint
        if left.end - left.first != positions:
            raise NotAsMeant(f"a checkpoint has {left.end - left.first} positions, not {positions}")
        self._watched.watch()
        turn = self._live.resume(session, until)
        self._live.finish(turn)
        again = _paused(turn)
        if (left.layer, left.first) == (again.checkpoint.layer, again.checkpoint.first) or again.resumed is None:
            raise NotAsMeant("a turn that was resumed is where it was")
        restore_s = self._watched.ready_at - turn.sent_at
        return PauseTimes(left.saved_ms / 1e3, again.resumed.dispatch_ms / 1e3, restore_s), turn


def _paused(turn: LiveTurn) -> Paused:
    if not isinstance(turn.end, Paused):
        raise NotAsMeant("a turn ended that was to pause")
    return turn.end
