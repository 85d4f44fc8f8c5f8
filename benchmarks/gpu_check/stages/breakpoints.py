"""What pausing, restoring and steering cost, and what breakpoints cost those that have none."""

from random import Random

import numpy as np

from app.gpu.models.base import LayerStack
from benchmarks.engine.away import random_tokens
from benchmarks.engine.decoding import DecodeBench
from benchmarks.engine.loading import FEW, build, load_layers
from benchmarks.engine.pauses import PauseBench
from benchmarks.engine.watched import WatchedStack
from benchmarks.gpu_check.context import StageContext
from benchmarks.spread import middle_half, ratio_of_medians
from loadgen.report.figures import Spread, Target

RESTORED_MS = Target(1.3)
UNARMED = Target(1.0024)
KINDS = ("plain", "again", "unarmed", "beside_paused", "beside_armed", "steered")
LEAST_S = 6.0
FEWEST_ROUNDS = 2


def run(context: StageContext) -> None:
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
        context.journal.figure(f"{label}, p50", "ms", middle_half(milliseconds), RESTORED_MS)
        context.journal.value(f"{label}, p99", "ms", float(np.quantile(milliseconds, 0.99)))


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
    _report(context, rounds)


def _report(context: StageContext, rounds: list[dict[str, float]]) -> None:
    journal, width = context.journal, context.plan.breakpoints.width
    for kind in KINDS:
        journal.samples(f"{kind}, tok/s", [each[kind] for each in rounds])
    plain = middle_half([each["plain"] for each in rounds])
    journal.figure(f"Decode of {width} sessions without breakpoints", "tok/s", plain)
    noise = _ratio(rounds, "again")
    worst = max(noise.high, 1 / noise.low)
    journal.figure("The same again / without: the noise", "×", noise)
    journal.figure("Time with breakpoints taken again / without", "×", _ratio(rounds, "unarmed"), UNARMED)
    journal.figure("Time beside a paused session / alone", "×", _ratio(rounds, "beside_paused"), UNARMED)
    journal.figure("Time beside an armed one in the batch / without", "×", _ratio(rounds, "beside_armed"))
    journal.figure("Time steered / not, against the noise", "×", _ratio(rounds, "steered"), Target(worst))


def _ratio(rounds: list[dict[str, float]], kind: str) -> Spread:
    """Of times; the median over rounds, with its 95 % confidence interval."""
    ratios = [each["plain"] / each[kind] for each in rounds]
    return ratio_of_medians(ratios, [1.0] * len(ratios))
