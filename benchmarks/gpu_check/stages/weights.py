"""A model several times larger than its share of the device: bandwidth, first token, and Accelerate beside it."""

import gc
import tempfile
from dataclasses import dataclass
from random import Random
from statistics import median

import torch

from app.gpu.startup.loader import load_engine
from app.gpu.startup.weights import weight_bytes
from app.machine.memory import read_host_memory
from app.model_store.resolve import ResolvedModel
from benchmarks.engine.away import random_tokens
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import live, make_settings
from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.large_model import MEMORY_SHARE, make_large_model
from benchmarks.gpu_check.plan import StreamPlan
from benchmarks.gpu_check.rivals.accelerate import time_accelerate
from benchmarks.gpu_check.stages.copies import PlainCopies
from loadgen.experiments.weights.generation import Generation, Timed
from loadgen.report.figures import Spread, Target

OF_PINNED = Target(0.9, at_least=True)
OVER_SWEEP = Target(1.3)
AHEAD = Target(1.0, at_least=True)
BLOCK_TOKENS = 16
PLAIN_COPIES = 4
"""At once, so that the end of one is not waited for before the next."""
LEAST_S = 60.0
"""With less time left Accelerate is not begun: it makes the model, and copies it a few times from pageable memory."""
CHART = "Streamed weights"


def run(context: StageContext) -> None:
    """Djinn with every batch, in rounds with plain copies; then Accelerate, if there is time."""
    plan, model = context.plan.streaming, make_large_model(context)
    room = max(batch * (plan.prompt // batch + plan.tokens + 2 * BLOCK_TOKENS) for batch in plan.batches)
    with tempfile.TemporaryDirectory() as cache:
        settings = make_settings(
            context.device,
            plan.model,
            weights_device=plan.budget,
            cache_dir=cache,
            max_step_tokens=plan.prompt,
            max_running=max(plan.batches),
            kv_device=f"1x{room}",
            kv_policy="none",
        )
        plain = PlainCopies(plan.plain_bytes, context.device)
        with live(context, load_engine(model, settings.engine())) as engine:
            bench = _Bench(context, engine, plain)
            own = {batch: bench.measure(batch) for batch in plan.batches}
    del engine, bench, plain
    gc.collect()
    if context.device == "cuda":
        torch.cuda.empty_cache()
        if missing := _missing_for_accelerate(context, model):
            context.journal.note(f"There was no {missing} left for Accelerate.")
            return
    _report_accelerate(context, time_accelerate(model, plan, context.device), own[min(own)])


@dataclass(frozen=True, slots=True)
class Own:
    """Medians of Djinn with one batch."""

    first_s: float
    tokens_per_s: float


class _Bench:
    def __init__(self, context: StageContext, engine: LiveEngine, plain: PlainCopies) -> None:
        self._context = context
        self._plan = context.plan.streaming
        self._engine = engine
        self._plain = plain
        self._random = Random(0)
        self._streamed = streamed_bytes(engine, self._plan)
        context.journal.fact("weights streamed in a pass", f"{self._streamed / 1e9:.2f} GB")

    def measure(self, batch: int) -> Own:
        """All rounds of a batch."""
        self._time(batch)  # not kept: nothing shall be allocated or compiled under the clock
        rounds = [(self._plain.to_device(PLAIN_COPIES), self._time(batch)) for _ in range(self._plan.rounds)]
        journal, name = self._context.journal, f"batch {batch}"
        rates = [self._streamed * found.steps_per_s / 1e9 for _, found in rounds]
        copies = [copy for copy, _ in rounds]
        firsts = [found.first_s for _, found in rounds]
        journal.samples(f"streamed weights, {name}, GB/s", rates)
        journal.samples(f"first token, {name}, s", firsts)
        shares = [rate / copy for rate, copy in zip(rates, copies, strict=True)]
        sweeps = [first * copy * 1e9 / self._streamed for first, copy in zip(firsts, copies, strict=True)]
        tokens = Spread.over([found.tokens_per_s for _, found in rounds])
        journal.point(CHART, "Djinn", batch, tokens.median)
        journal.figure(f"Streamed weights, {name}", "GB/s", Spread.over(rates))
        journal.figure(f"Streamed weights / plain pinned copy, {name}", "×", Spread.over(shares), OF_PINNED)
        journal.figure(f"First token of {self._plan.prompt} tokens of prompt, {name}", "s", Spread.over(firsts))
        target = OVER_SWEEP if batch == min(self._plan.batches) else None
        journal.figure(f"First token / one pass of plain copies, {name}", "×", Spread.over(sweeps), target)
        journal.figure(f"Tokens, {name}", "tok/s", tokens)
        return Own(median(firsts), tokens.median)

    def _time(self, batch: int) -> Timed:
        prompts = [random_tokens(self._random, self._plan.prompt // batch) for _ in range(batch)]
        turns = self._engine.generate_together(prompts, self._plan.tokens)
        began = turns[0].sent_at
        times = [[at - began for at in turn.times] for turn in turns]
        return Generation([turn.token_ids for turn in turns], times).timed()


def streamed_bytes(live: LiveEngine, plan: StreamPlan) -> int:
    """What a pass brings to the device: all but what is kept there and the embedding, of which it needs some rows."""
    text, info = live.memory().text, live.info
    return text.total_bytes - text.kept_bytes - info.vocab_size * info.hidden_size * plan.element_bytes


def _missing_for_accelerate(context: StageContext, model: ResolvedModel) -> str:
    """What it lacks; empty if it lacks nothing."""
    if context.left_s < LEAST_S:
        return "time"
    return (
        ""
        if weight_bytes(model, torch.device("cuda"), torch.bfloat16) < MEMORY_SHARE * read_host_memory().free_bytes
        else "memory"
    )


def _report_accelerate(context: StageContext, found: Timed, own: Own) -> None:
    journal = context.journal
    journal.point(CHART, "Accelerate", 1, found.tokens_per_s)
    journal.value("Accelerate, first token", "s", found.first_s)
    journal.value("Accelerate, tokens, batch 1", "tok/s", found.tokens_per_s)
    journal.value("Accelerate's time to the first token / Djinn's", "×", found.first_s / own.first_s, AHEAD)
    journal.value("Djinn's tokens / Accelerate's", "×", own.tokens_per_s / found.tokens_per_s, AHEAD)
