"""What breakpoints cost sessions that decode: kinds of sessions take turns in random order, with the same prompts."""

from collections.abc import Callable
from random import Random

from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Pass, When
from app.domain.values import SessionId
from app.gpu.models.base import LayerStack
from benchmarks.figures import Target
from benchmarks.gpu_check.away import random_tokens
from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.engines import build
from benchmarks.gpu_check.live import LiveEngine, LiveTurn
from benchmarks.gpu_check.plan import BreakpointPlan
from benchmarks.gpu_check.windows import decode_rate
from benchmarks.spread import Spread, middle_half, ratio_of_medians

UNARMED = Target(1.0024)
NEVER = 10**6
FACTOR = 0.9
LEAST_S = 6.0
FEWEST_ROUNDS = 2


def measure_overheads(context: StageContext, stack: LayerStack) -> None:
    """As many rounds as there is time for."""
    plan = context.plan.breakpoints
    room = f"{plan.width + 2}x{plan.prompt_tokens + plan.steps + 32}"
    rounds: list[dict[str, float]] = []
    with build(context, plan.model, stack, max_running=plan.width + 1, kv_device=room, kv_policy="none") as live:
        bench = _Bench(live, plan)
        bench.round()  # not kept: it leaves the prompts in the prefix cache
        while len(rounds) < max(plan.rounds, FEWEST_ROUNDS):
            if len(rounds) >= FEWEST_ROUNDS and context.left_s < LEAST_S:
                break
            rounds.append(bench.round())
    _report(context, rounds)


class _Bench:
    def __init__(self, live: LiveEngine, plan: BreakpointPlan) -> None:
        self._live = live
        self._plan = plan
        self._random = Random(0)
        self._prompts = [random_tokens(self._random, plan.prompt_tokens) for _ in range(plan.width + 1)]
        layers = tuple(sorted({live.info.num_layers * quarter // 4 for quarter in (1, 2, 3)}))
        self._stop = Breakpoint("stop", layers[:1], Action.PAUSE, When(Pass.DECODE))
        self._unmatched = Breakpoint("position", layers, Action.PAUSE, When(Pass.DECODE, position=NEVER))
        self._steering = Breakpoint("steer", layers[:1], Action.EDIT, edits=(Edit(EditOp.SCALE, FACTOR),))

    def round(self) -> dict[str, float]:
        """Tokens a second of each kind, once."""
        kinds: dict[str, Callable[[], float]] = {
            "plain": lambda: self._rate(self._open()),
            "again": lambda: self._rate(self._open()),
            "unarmed": lambda: self._rate(self._open_unarmed()),
            "beside_paused": self._rate_beside_paused,
            "beside_armed": lambda: self._rate([*self._open()[1:], self._live.open([self._unmatched])]),
            "steered": lambda: self._rate(self._open(self._steering)),
        }
        order = self._random.sample(list(kinds), len(kinds))
        return {kind: kinds[kind]() for kind in order}

    def _open(self, *breakpoints: Breakpoint) -> list[SessionId]:
        return [self._live.open(breakpoints) for _ in range(self._plan.width)]

    def _open_unarmed(self) -> list[SessionId]:
        """Sessions whose breakpoints have been taken again."""
        sessions = self._open(self._stop, self._unmatched)
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
        live, steps = self._live, self._plan.steps
        turns: list[LiveTurn] = [
            live.submit(session, prompt, steps) for session, prompt in zip(sessions, self._prompts, strict=False)
        ]
        live.finish(*turns)
        live.close(*sessions)
        return decode_rate(turns)


def _report(context: StageContext, rounds: list[dict[str, float]]) -> None:
    journal, width = context.journal, context.plan.breakpoints.width
    for kind in rounds[0]:
        journal.samples(f"{kind}, tok/s", [each[kind] for each in rounds])
    journal.figure(f"Decode of {width} sessions without breakpoints", "tok/s", _rates(rounds, "plain"))
    noise = _ratio(rounds, "again")
    worst = max(noise.high, 1 / noise.low)
    journal.figure("The same again / without: the noise", "×", noise)
    journal.figure("Time with breakpoints taken again / without", "×", _ratio(rounds, "unarmed"), UNARMED)
    journal.figure("Time beside a paused session / alone", "×", _ratio(rounds, "beside_paused"), UNARMED)
    journal.figure("Time beside an armed one in the batch / without", "×", _ratio(rounds, "beside_armed"))
    journal.figure("Time steered / not, against the noise", "×", _ratio(rounds, "steered"), Target(worst))


def _rates(rounds: list[dict[str, float]], kind: str) -> Spread:
    return middle_half([each[kind] for each in rounds])


def _ratio(rounds: list[dict[str, float]], kind: str) -> Spread:
    """Of times; the median over rounds, with its 95 % confidence interval."""
    ratios = [each["plain"] / each[kind] for each in rounds]
    return ratio_of_medians(ratios, [1.0] * len(ratios))
