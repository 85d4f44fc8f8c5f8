"""`python -m loadgen whitebox`: whether sessions can be stopped between layers, what it costs, and what others notice.

Everything is measured from outside, on a running server: tokens with pauses in every pass against tokens without,
round trips, steering, throughput beside a paused session, and the server's memory before, during and after.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median

from client import MemoryMap
from loadgen.errors import LoadgenError
from loadgen.experiments.base import Bench, DjinnExperiment, Found, show_parts
from loadgen.experiments.density.rows import percentiles
from loadgen.experiments.whitebox.parts import (
    Seen,
    Stage,
    Waited,
    WhiteboxPlan,
    Window,
    measure_windows,
    run_steered,
    run_trials,
)
from loadgen.load.prompts import Corpus, TokenIds, cut_prompts, fingerprint
from loadgen.load.workload import Workload, plan_trace
from loadgen.report.report import Chart, ending_early, noting
from loadgen.report.tables import Figure, Row, Spread, Table, Target, all_of, exact
from loadgen.stats import Distribution
from loadgen.targets.djinn import between, quantile

CONFIDENCE = 0.95
RESTORE_MS, DISPATCH_MS, KEPT = Target(2.0), Target(0.1), Target(0.99, at_least=True)
WAITS, SECONDS, TRIALS, STEERED = "waits", "tokens by second", "trials", "steered turns"
PARTS = {"token accuracy": run_trials, "steering": run_steered, "throughput of the others": measure_windows}


async def prepare(bench: Bench[WhiteboxPlan]) -> tuple[tuple[int, ...], tuple[TokenIds, ...]]:
    """Choose layers, cut prompts, and run one turn too many: what is slow only once stays out of the measurement."""
    plan, subject = bench.plan, bench.subject
    await subject.prepare(plan.context + plan.tokens)
    num_layers = subject.num_layers
    # Fewer in a model with fewer than four layers.
    layers = plan.layers or tuple(sorted({num_layers * quarters // 4 for quarters in (1, 2, 3)}))
    if max(layers) >= num_layers:
        raise LoadgenError(f"layers must be from 0 to {num_layers - 1} for target {subject.spec.name}")
    count = plan.prompts(len(layers)) + 1
    load = Workload(count, context=plan.context, turns=1, system_tokens=0, seed=plan.seed)
    cut = await cut_prompts(plan_trace(load), load, bench.corpus, subject.tokenize)
    *prompts, spare = (turns[0] for turns in cut)
    await subject.answer(spare, plan.tokens)
    return layers, tuple(prompts)


async def measure(
    bench: Bench[WhiteboxPlan], prepared: tuple[tuple[int, ...], tuple[TokenIds, ...]], found: Found
) -> None:
    """Run the parts between two looks at the server; one that fails does not keep the next from running."""
    stage, plan, subject = Stage(bench, *prepared, found), bench.plan, bench.subject
    seen, answers = stage.seen, len(stage.layers) * plan.sequences
    steps = dict(zip(PARTS, (answers, answers, 2 * plan.repeats), strict=True))
    with (
        show_parts(bench.console, subject.spec.name, steps) as advance,
        ending_early(found),
        noting("the server's own figures", found.failures),
    ):
        seen.memory["before"], earlier = await subject.memory(), await subject.histograms()
        try:
            for name, part in PARTS.items():
                with noting(name, found.failures):
                    await part(stage, partial(advance, name))
        finally:
            seen.memory["after"], later = await subject.memory(), await subject.histograms()
            seen.histograms = {name: between(earlier[name], new) for name, new in later.items()}
    found.inputs["prompts_sha256"] = fingerprint([[prompt] for prompt in stage.prompts])
    found.figures += _figures(seen)
    found.tables += _tables(seen)
    found.charts += _charts()


def sign_test(ratios: Sequence[float]) -> Spread | None:
    """The middle of all pairs, and the bounds of its 95 % confidence interval; None of no pairs.

    The bounds are the two pairs with so many below and above them as the sign test has it (Conover, Practical
    Nonparametric Statistics, section 3.2). Fewer than six pairs are too few for it: the bounds are the two ends then.
    """
    if not ratios:
        return None
    ordered, outside, tail = sorted(ratios), 0, 1.0
    while 2 * (tail := tail + math.comb(len(ratios), outside + 1)) <= (1 - CONFIDENCE) * 2 ** len(ratios):
        outside += 1
    return Spread(median(ordered), ordered[outside], ordered[-1 - outside], len(ordered))


def pair_windows(windows: Iterable[Window]) -> list[float]:
    """For each repeat that is whole, the rate with a session paused over the rate without."""
    rates = {(window.repeat, window.paused): window.tokens_per_s for window in windows}
    whole = [repeat for repeat, paused in sorted(rates) if paused and (repeat, False) in rates]
    return [rates[repeat, True] / rates[repeat, False] for repeat in whole]


def _figures(seen: Seen) -> Iterator[Figure]:
    tokens = sum(max(len(trial.plain), len(trial.paused)) for trial in seen.trials)
    yield all_of("tokens that are the same with a pause in every pass", sum(t.matching for t in seen.trials), tokens)
    yield all_of("turns that paused in every pass", sum(t.paused_everywhere for t in seen.trials), len(seen.trials))
    for name, what, target in (
        ("djinn_checkpoint_restore_seconds", "a checkpoint is restored, p50", RESTORE_MS),
        ("djinn_resume_dispatch_seconds", "a resume is dispatched, p50", DISPATCH_MS),
    ):
        buckets = seen.histograms.get(name)
        told = bool(buckets and buckets[-1].count)
        yield exact(what, "ms", 1e3 * quantile(buckets, 0.5) if buckets and told else None, target)
    layers = {turn.layer for turn in seen.steered}
    changed = {turn.layer for turn in seen.steered if turn.differs_at is not None}
    yield all_of("layers where steering changes what is said", len(changed), len(layers))
    yield Figure("throughput of others kept while one is paused", "×", sign_test(pair_windows(seen.windows)), KEPT)
    paused = [window for window in seen.windows if window.paused]
    yield all_of("paused turns that end as they would have", sum(w.undisturbed for w in paused), len(paused))
    before, after = (seen.memory.get(when) for when in ("before", "after"))
    held = None if before is None or after is None else max(0, _held(after) - _held(before))
    yield exact("memory that sessions hold afterwards beyond before", "bytes", held, Target(0))


def _held(memory: MemoryMap) -> int:
    """Bytes of KV in all tiers, and of residual streams."""
    tiers, stack = (memory.data.device, memory.data.host, memory.data.disk), memory.stack
    return sum(tier.owned_bytes for tier in tiers) + stack.checkpoint_bytes + stack.capture_bytes


def _tables(seen: Seen) -> Iterator[Table]:
    accuracy: list[Row] = []
    for layer in sorted({trial.layer for trial in seen.trials}):
        mine = [trial for trial in seen.trials if trial.layer == layer]
        same, tokens = sum(t.matching for t in mine), sum(max(len(t.plain), len(t.paused)) for t in mine)
        accuracy.append(
            {
                "pause after": f"layer {layer}",
                "sequences": len(mine),
                "same tokens": f"{same} of {tokens}",
                "pauses in prompts": sum(trial.prefill_pauses for trial in mine),
                "pauses in decoding": sum(trial.decode_pauses for trial in mine),
            }
        )
    yield Table("Token accuracy with a pause in every pass", accuracy)
    yield Table("Latency, milliseconds", list(_latencies(seen)), "One position is a decoded token, more are a prompt.")
    clocks: list[Row] = [
        {"": name, "samples": int(b[-1].count), **{f"p{100 * s:g}": 1e3 * quantile(b, s) for s in (0.5, 0.9, 0.99)}}
        for name, b in seen.histograms.items()
        if b[-1].count
    ]
    yield Table("The server's own clock, milliseconds", clocks, "As exact as the buckets of its histograms.")
    steering: list[Row] = []
    for layer in sorted({turn.layer for turn in seen.steered}):
        places = [turn.differs_at for turn in seen.steered if turn.layer == layer]
        first = [place for place in places if place is not None]
        row: Row = {
            "steered after": f"layer {layer}",
            "sequences": len(places),
            "that say something else": f"{len(first)} of {len(places)}",
            "from token (median)": median(first) if first else None,
        }
        steering.append(row)
    yield Table("Steering", steering)
    yield Table(
        "Throughput of the others",
        [{"repeat": w.repeat + 1, "a session is paused": w.paused, "tokens/s": w.tokens_per_s} for w in seen.windows],
    )
    yield Table("Memory, MiB but for sessions", [{"": when, **_sizes(memory)} for when, memory in seen.memory.items()])
    yield Table(
        WAITS,
        [{"waited": each.waited.value, "positions": each.positions, "ms": 1e3 * each.seconds} for each in seen.waits],
        shown=False,
    )
    yield Table(TRIALS, [{**asdict(t), "matching": t.matching} for t in seen.trials], shown=False)
    yield Table(STEERED, [asdict(turn) for turn in seen.steered], shown=False)
    yield Table(
        SECONDS,
        [
            {"who": f"{who} paused, repeat {w.repeat + 1}", "second": place + 0.5, "tokens": count}
            for w in seen.windows
            for who in ("one session" if w.paused else "none",)
            for place, count in enumerate(w.tokens)
        ],
        shown=False,
    )


def _latencies(seen: Seen) -> Iterator[Row]:
    for waited in Waited:
        for of_a_prompt in (False, True):
            mine = [each for each in seen.waits if each.waited is waited and (each.positions > 1) == of_a_prompt]
            if mine:
                positions = sum(each.positions for each in mine) / len(mine)
                found = percentiles(Distribution.of(each.seconds for each in mine))
                yield {"": waited.value, "positions": round(positions), **found}


def _sizes(memory: MemoryMap) -> Row:
    tiers = {"device": memory.data.device, "host": memory.data.host, "disk": memory.data.disk}
    sizes = {
        "checkpoints": memory.stack.checkpoint_bytes,
        **{f"KV on {name}": tier.owned_bytes for name, tier in tiers.items()},
        "KV kept for reuse": sum(tier.cached_bytes for tier in tiers.values()),
    }
    return {"sessions": memory.sessions, **{name: size / 2**20 for name, size in sizes.items()}}


def _charts() -> Iterator[Chart]:
    title = "Throughput of the others, second by second"
    caption = "A line for each repeat. Lines that lie on each other: who is paused costs the others nothing."
    yield Chart(title, caption, "lines", SECONDS, "second", "tokens", "who", x_label="seconds", y_label="tokens/s")
    title, one = "A token with a pause in its pass, and one without", {"positions": 1}
    caption = "Share of waits for one position that took no longer, seen by the client, and by the engine."
    yield Chart(title, caption, "cdf", WAITS, "ms", by="waited", where=one, x_label="milliseconds", log_x=True)


def _lead(plan: WhiteboxPlan, _corpus: Corpus) -> str:
    return (
        f"{plan.sequences} sequences of {plan.context} + {plan.tokens} tokens, greedy; steering by {plan.scale:g}; "
        f"{plan.others} others during a pause of {plan.pause_seconds:g} s, {plan.repeats} times."
    )


WHITEBOX = DjinnExperiment("whitebox", "The white-box experiment", WhiteboxPlan, _lead, prepare, measure)
