"""More sessions than the device holds: all of them end, and say what they would have said alone. And what pausing,
restoring and steering cost, and what breakpoints cost those that have none.
"""

import time
from functools import partial
from random import Random

import numpy as np

from app.domain.values import Phase
from app.gpu.models.base import LayerStack
from app.messages import TurnFinished
from benchmarks.engine.decoding import DecodeBench, PauseBench
from benchmarks.engine.live import LiveEngine, LiveTurn, random_tokens
from benchmarks.engine.loading import FEW, WatchedStack, build, load, load_layers
from benchmarks.gpu_check.journal import StageContext
from benchmarks.gpu_check.plan import SessionsPlan
from benchmarks.measuring import middle_half, ratio_of_medians
from loadgen.report.tables import Spread, Target

ALL = Target(1.0, at_least=True)
NONE = Target(0.0)
LEAST_S = 6.0


def stage_sessions(context: StageContext) -> None:
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


KINDS = ("plain", "again", "unarmed", "unmatched", "beside_paused", "beside_armed", "steered")
TAKEN_MS = Target(0.1)
FEWEST_ROUNDS = 2


def stage_breakpoints(context: StageContext) -> None:
    """Restores first: they take a second."""
    stack = load_layers(context, context.plan.breakpoints.model)
    _measure_restores(context, stack)
    _measure_overheads(context, stack)


def _measure_restores(context: StageContext, stack: LayerStack) -> None:
    plan, random = context.plan.breakpoints, Random(0)
    watched, tokens = WatchedStack(stack, context.device), plan.prefill_tokens
    settings = {"kv_device": f"2x{tokens + 256}", "kv_policy": "none", "max_step_tokens": tokens}
    with build(context, plan.model, watched, max_running=FEW, **settings) as live:
        bench = PauseBench(live, watched, lambda count: random_tokens(random, count))
        decode = bench.in_decode(plan.restores, plan.prompt_tokens)
        prefill = bench.in_prefill(plan.restores // 2, tokens)
    for name, pauses in (("a decode pass", decode), (f"a prompt of {tokens} tokens", prefill)):
        milliseconds = [each.restore_s * 1e3 for each in pauses]
        context.journal.samples(f"restores of {name}, ms", milliseconds)
        label = f"Checkpoint of {name} restored, from `Resume` to the first layer"
        context.journal.figure(f"{label}, p50", "ms", middle_half(milliseconds), Target(plan.restored_ms))
        context.journal.value(f"{label}, p99", "ms", float(np.quantile(milliseconds, 0.99)))
        taken, saved = ([1e3 * getattr(each, part) for each in pauses] for part in ("dispatch_s", "save_s"))
        context.journal.figure(f"`Resume` taken in {name}, p50", "ms", middle_half(taken), TAKEN_MS)
        context.journal.figure(f"Checkpoint of {name} saved, p50", "ms", middle_half(saved))


def _measure_overheads(context: StageContext, stack: LayerStack) -> None:
    """As many rounds as there is time for."""
    plan = context.plan.breakpoints
    room = f"{plan.width + 2}x{plan.prompt_tokens + plan.steps + 32}"
    rounds: list[dict[str, float]] = []
    with build(context, plan.model, stack, max_running=plan.width + 1, kv_device=room, kv_policy="none") as live:
        bench = DecodeBench(live, width=plan.width, prompt_tokens=plan.prompt_tokens, steps=plan.steps)
        bench.round(*KINDS)  # not kept
        while len(rounds) < max(plan.rounds, FEWEST_ROUNDS):
            if len(rounds) >= FEWEST_ROUNDS and context.left_s < LEAST_S:
                break
            rounds.append(bench.round(*KINDS))
    _report_overheads(context, rounds)


def _report_overheads(context: StageContext, rounds: list[dict[str, float]]) -> None:
    journal, width, unarmed = context.journal, context.plan.breakpoints.width, Target(context.plan.breakpoints.unarmed)
    for kind in KINDS:
        journal.samples(f"{kind}, tok/s", [each[kind] for each in rounds])
    plain = middle_half([each["plain"] for each in rounds])
    journal.figure(f"Decode of {width} sessions without breakpoints", "tok/s", plain)
    noise = _ratio(rounds, "again")
    worst = max(noise.high, 1 / noise.low)
    journal.figure("The same again / without: the noise", "×", noise)
    journal.figure("Time with breakpoints taken again / without", "×", _ratio(rounds, "unarmed"), unarmed)
    never = unarmed if context.device == "cpu" else None
    journal.figure("Time with breakpoints that never match / without", "×", _ratio(rounds, "unmatched"), never)
    journal.figure("Time beside a paused session / alone", "×", _ratio(rounds, "beside_paused"), unarmed)
    journal.figure("Time beside an armed one in the batch / without", "×", _ratio(rounds, "beside_armed"))
    journal.figure("Time steered / not, against the noise", "×", _ratio(rounds, "steered"), Target(worst))


def _ratio(rounds: list[dict[str, float]], kind: str) -> Spread:
    """Of times; the median over rounds, with its 95 % confidence interval."""
    ratios = [each["plain"] / each[kind] for each in rounds]
    return ratio_of_medians(ratios, [1.0] * len(ratios))
