"""More sessions than the device holds: all of them end, and say what they would have said alone."""

import time
from functools import partial
from random import Random

from app.domain.values import Phase
from app.messages import TurnFinished
from benchmarks.engine.away import random_tokens
from benchmarks.engine.live import LiveEngine, LiveTurn
from benchmarks.engine.loading import load
from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.plan import SessionsPlan
from loadgen.report.figures import Spread, Target

ALL = Target(1.0, at_least=True)
NONE = Target(0.0)
LEAST_S = 6.0


def run(context: StageContext) -> None:
    """Every session's first turn, then every session's second, then some of them again, alone.

    The engine is batch invariant: only then can tokens be compared that were computed in different company.
    """
    plan = context.plan.sessions
    budgets = {"kv_device": f"{plan.on_device}x{plan.context}", "kv_host": f"{plan.on_host}x{plan.context}"}
    random = Random(0)
    texts = [(random_tokens(random, plan.prompt), random_tokens(random, plan.more)) for _ in range(plan.sessions)]
    with load(context, plan.model, batch_invariant=True, max_running=plan.sessions, **budgets) as live:
        demand = plan.sessions * plan.context * live.info.kv_bytes_per_token
        room = plan.on_device * plan.context * live.info.kv_bytes_per_token
        context.journal.fact("KV of all sessions", f"{demand / 1e9:.1f} GB; the device holds {room / 1e9:.1f} GB")
        crowd = Crowd(live, plan, texts)
        began = time.perf_counter()
        for turn in range(2):
            crowd.take_turns(turn)
        _report(context, live, crowd, time.perf_counter() - began)
        crowd.close()
        _check(context, live, plan, crowd)


class Crowd:
    """The sessions, and what each has said in each turn."""

    def __init__(self, live: LiveEngine, plan: SessionsPlan, texts: list[tuple[list[int], list[int]]]) -> None:
        self._live = live
        self._plan = plan
        self.texts = texts
        self._sessions = [live.open() for _ in texts]
        self.turns: list[list[LiveTurn]] = [[] for _ in texts]

    def take_turns(self, number: int) -> None:
        """All at once; who has had its turn waits for a tool."""
        for session, text, turns in zip(self._sessions, self.texts, self.turns, strict=True):
            turns.append(self._live.submit(session, text[number], self._plan.reply))
        running = list(range(len(self.turns)))
        while running:
            self._live.wait(partial(self._any_is_over, tuple(running), number))
            for over in [each for each in running if self.turns[each][number].is_over]:
                running.remove(over)
                self._live.set_phase(self._sessions[over], Phase.IO_WAIT)

    def _any_is_over(self, sessions: tuple[int, ...], number: int) -> bool:
        return any(self.turns[session][number].is_over for session in sessions)

    @property
    def complete(self) -> list[int]:
        """Numbers of the sessions that have had both turns with all tokens."""
        return [number for number, turns in enumerate(self.turns) if all(map(self._is_complete, turns))]

    def recomputed(self) -> int:
        """Tokens that had had their KV and lost it."""
        ends = [turn.end for turns in self.turns for turn in turns]
        return sum(end.usage.tokens_recomputed for end in ends if end is not None)

    def close(self) -> None:
        """End them."""
        self._live.close(*self._sessions)

    def _is_complete(self, turn: LiveTurn) -> bool:
        return isinstance(turn.end, TurnFinished) and len(turn.token_ids) == self._plan.reply


def _report(context: StageContext, live: LiveEngine, crowd: Crowd, seconds: float) -> None:
    journal, count = context.journal, context.plan.sessions.sessions
    done, memory = len(crowd.complete), live.memory()
    journal.fact("sessions that ended", f"{done} of {count}")
    journal.value("Sessions that ended / begun", "×", done / count, ALL)
    journal.value("All turns of all sessions", "s", seconds)
    first_tokens = [turn.times[0] - turn.sent_at for turns in crowd.turns for turn in turns[1:] if turn.times]
    if first_tokens:
        journal.figure("First token of a second turn, all sent at once", "s", Spread.over(first_tokens))
    journal.value("Tokens recomputed", "", crowd.recomputed(), NONE)
    journal.value("Sessions that lost KV", "", memory.counts.dropped, NONE)
    for way, name in (("out", "left the device"), ("in", "came back")):
        journal.value(f"KV that {name}", "GB", memory.moves[way].bytes / 1e9)
    for error in {turn.error.message for turns in crowd.turns for turn in turns if turn.error is not None}:
        journal.note(f"A turn failed: {error}")


def _check(context: StageContext, live: LiveEngine, plan: SessionsPlan, crowd: Crowd) -> None:
    """Answers of sessions that have the engine to themselves, in a namespace of their own: they share no KV."""
    same = checked = 0
    numbers = [place * plan.sessions // max(1, plan.checked) for place in range(plan.checked)]
    for number in numbers:
        if context.left_s < LEAST_S and checked:
            break
        session = live.open(namespace=f"alone-{number}")
        alone = [live.generate(session, text, plan.reply).token_ids for text in crowd.texts[number]]
        live.close(session)
        checked += 1
        same += alone == [turn.token_ids for turn in crowd.turns[number]]
    if checked:
        context.journal.fact("answers compared", f"{checked}, with {same} equal")
        context.journal.value("Answers equal to those of a session alone", "×", same / checked, ALL)
