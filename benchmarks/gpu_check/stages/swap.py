"""How fast a session's KV leaves the device and comes back, signalled to a real engine, beside plain pinned copies."""

from random import Random

from benchmarks.engine.away import Moved, Passer, check_whole, fetch, park, random_tokens
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import FEW, load
from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.plan import SwapPlan
from benchmarks.gpu_check.stages.copies import PlainCopies
from loadgen.report.figures import Spread, Target

SHARE = Target(0.9, at_least=True)
LEAST_S = 4.0


def run(context: StageContext) -> None:
    """Rounds of a plain copy and a move, each way."""
    plan = context.plan.swap
    plain = PlainCopies(plan.plain_bytes, context.device)
    budgets = {"kv_device": f"1x{plan.device_tokens}", "kv_host": f"3x{plan.device_tokens}"}
    rounds: list[dict[str, float]] = []
    with load(context, plan.model, max_running=FEW, **budgets) as live:
        random = Random(0)
        passer = Passer(live, random, plan.device_tokens)
        _round(live, plan, plain, passer, random)  # not kept: nothing shall be allocated or compiled under the clock
        before = live.memory().moves
        while len(rounds) < plan.rounds and (not rounds or context.left_s > LEAST_S):
            rounds.append(_round(live, plan, plain, passer, random))
        after = live.memory().moves
    for way in ("out", "in"):
        seconds = after[way].seconds - before[way].seconds
        own = (after[way].bytes - before[way].bytes) / seconds / 1e9
        _report(context, way, rounds, own)
    context.journal.fact("session in swap", f"{plan.tokens} tokens of {plan.model}, {_gib(live, plan):.2f} GiB")


def _round(live: LiveEngine, plan: SwapPlan, plain: PlainCopies, passer: Passer, random: Random) -> dict[str, float]:
    """GB/s of everything once."""
    session = live.open()
    live.generate(session, random_tokens(random, plan.tokens))
    found = {"plain out": plain.to_host()}
    found["out"] = _checked(live, park(live, session), plan)
    passer.pass_over()
    found["plain in"] = plain.to_device()
    found["in"] = _checked(live, fetch(live, session), plan)
    live.close(session)
    return found


def _checked(live: LiveEngine, moved: Moved, plan: SwapPlan) -> float:
    check_whole(live, moved, plan.tokens)
    return moved.gb_per_s


def _report(context: StageContext, way: str, rounds: list[dict[str, float]], own: float) -> None:
    journal, name = context.journal, {"out": "Leaving the device", "in": "Coming back"}[way]
    rates, plain = [each[way] for each in rounds], [each[f"plain {way}"] for each in rounds]
    journal.samples(f"moves {way}, GB/s", rates)
    journal.samples(f"plain copies {way}, GB/s", plain)
    journal.figure(f"{name}, from signal to news", "GB/s", Spread.over(rates))
    journal.figure(f"Plain pinned copy beside it, {way}", "GB/s", Spread.over(plain))
    shares = [rate / copy for rate, copy in zip(rates, plain, strict=True)]
    journal.figure(f"{name} / plain pinned copy", "×", Spread.over(shares), SHARE)
    journal.value(f"{name}, by the engine's own clock", "GB/s", own)


def _gib(live: LiveEngine, plan: SwapPlan) -> float:
    return plan.tokens * live.info.kv_bytes_per_token / 2**30
