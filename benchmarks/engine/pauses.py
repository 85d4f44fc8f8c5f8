"""A session that pauses again and again: how long the engine takes to leave the batch, and to go on."""

from collections.abc import Callable
from dataclasses import dataclass

from app.domain.breakpoints import NEXT_BREAKPOINT, Action, Breakpoint, Pass, Until, When
from app.domain.values import SessionId
from app.messages import Paused
from benchmarks.engine.live import LiveEngine, LiveTurn
from benchmarks.engine.watched import WatchedStack
from loadgen.errors import NotAsMeant

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
