"""Tokens a second of batches, beside Transformers' own generation and what the memory's bandwidth allows."""

import gc
import math
import time
from collections.abc import Iterator
from enum import StrEnum
from random import Random
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from app.domain.values import ModelInfo
from benchmarks.engine.decoding import decode_rate
from benchmarks.engine.live import LiveEngine, random_tokens
from benchmarks.engine.loading import find_model, load, transformers_config
from benchmarks.gpu_check.journal import StageContext
from benchmarks.gpu_check.plan import DecodePlan
from benchmarks.gpu_check.stages.moves import memory_bandwidth
from loadgen.errors import NotAsMeant
from loadgen.report.tables import Spread, Target


class StepTimes:
    """A streamer for `generate`: notes when each step's tokens come out, as `time.perf_counter` has it."""

    def __init__(self) -> None:
        self._is_prompt = True
        self.seconds: list[float] = []

    def put(self, _tokens: object) -> None:
        """Told the prompt first, then each step's tokens."""
        if not self._is_prompt:
            self.seconds.append(time.perf_counter())
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is held back."""


class Way(StrEnum):
    """How its decode step runs. Compiled: as `generate` does it by itself where a static cache is on a GPU."""

    PLAIN = "static cache"
    COMPILED = "static cache, compiled"


LEAST_OF_WAY_S = {Way.PLAIN: 8.0, Way.COMPILED: 25.0}
"""With less time than that a batch is not begun: the first of a compiled one may take most of a minute."""


def rates_of_transformers(context: StageContext, plan: DecodePlan) -> Iterator[tuple[Way, int, list[float]]]:
    """Tokens a second of every batch, plain ones first, each as soon as it is known."""
    model = _make_model(plan.model, context.device)
    on_gpu = context.device == "cuda"
    for way in Way if on_gpu else (Way.PLAIN,):
        for batch in plan.batches:
            if context.left_s > LEAST_OF_WAY_S[way]:
                random = Random(batch)
                rates = [_rate(model, plan, batch, way, random) for _ in range(plan.rounds + 1)]
                yield way, batch, rates[1:]
            gc.collect()


def _make_model(name: str, device: str) -> Any:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(transformers_config(find_model(name)), dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def _rate(model: Any, plan: DecodePlan, batch: int, way: Way, random: Random) -> float:
    prompts = [random_tokens(random, plan.prompt_tokens) for _ in range(batch)]
    ids = torch.tensor(prompts, device=model.device)
    steps = StepTimes()
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=plan.tokens,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        disable_compile=way is Way.PLAIN,
        streamer=steps,
    )
    times = steps.seconds
    return batch * (len(times) - 1) / (times[-1] - times[0])


AHEAD = Target(1.0, at_least=True)
CHART = "Decode"


def stage_decode(context: StageContext) -> None:
    """Djinn at every batch, then Transformers at every batch, as far as there is time."""
    plan, device = context.plan.decode, context.device
    bandwidth = memory_bandwidth(device, plan.memory_bytes, rounds=3).median
    room = f"{max(plan.batches) + 1}x{plan.prompt_tokens + plan.tokens + 16}"
    own: dict[int, float] = {}
    with load(context, plan.model, max_running=max(plan.batches), kv_device=room, kv_policy="none") as live:
        for batch in plan.batches:
            own[batch] = _measure(context, live, batch, bandwidth)
    del live
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    if plan.beside_transformers:
        _beside_transformers(context, plan, own)


def _measure(context: StageContext, live: LiveEngine, batch: int, bandwidth: float) -> float:
    journal, plan = context.journal, context.plan.decode
    limit = bytes_limit(live.info, batch, plan.prompt_tokens + plan.tokens // 2, bandwidth)
    rates = djinn_rates(live, plan, batch)
    spread = Spread.over(rates)
    journal.samples(f"Djinn, batch {batch}, tok/s", rates)
    journal.point(CHART, "Djinn", batch, spread.median)
    journal.point(CHART, "bytes over bandwidth", batch, limit)
    journal.figure(f"Djinn, batch {batch}", "tok/s", spread)
    journal.value(f"Bytes over bandwidth, batch {batch}", "tok/s", limit)
    share = Spread.over([rate / limit for rate in rates])
    target = Target(plan.of_limit, at_least=True) if batch == 1 and plan.of_limit is not None else None
    journal.figure(f"Djinn / bytes over bandwidth, batch {batch}", "×", share, target)
    return spread.median


def djinn_rates(live: LiveEngine, plan: DecodePlan, batch: int) -> list[float]:
    """Tokens a second of each round. Raises `NotAsMeant`."""
    random = Random(batch)
    # The round that is not kept leaves the prompts in the prefix cache: else the first turn of many would end before
    # the last one begins to decode.
    prompts = [random_tokens(random, plan.prompt_tokens) for _ in range(batch)]
    rates = [decode_rate(live.generate_together(prompts, plan.tokens)) for _ in range(plan.rounds + 1)][1:]
    if any(map(math.isnan, rates)):
        raise NotAsMeant(f"of {batch} turns the first ended before the last one began to decode")
    return rates


def bytes_limit(info: ModelInfo, batch: int, context: int, bandwidth: float) -> float:
    """Tokens a second of a step that does nothing but read each weight once, and the KV of every session.

    `bandwidth` is in GB/s; `context` is the sessions' mean length. Of the embedding only a row a token is read.
    """
    element = {"float32": 4}.get(info.dtype, 2)
    weights = info.parameter_bytes - info.vocab_size * info.hidden_size * element
    step_bytes = weights + batch * context * info.kv_bytes_per_token
    return batch * bandwidth * 1e9 / step_bytes


def _beside_transformers(context: StageContext, plan: DecodePlan, own: dict[int, float]) -> None:
    best: dict[int, float] = {}
    for way, batch, rates in rates_of_transformers(context, plan):
        journal, name = context.journal, f"Transformers, {way}, batch {batch}"
        journal.samples(f"{name}, tok/s", rates)
        journal.point(CHART, f"Transformers, {way}", batch, mean(rates))
        journal.figure(name, "tok/s", Spread.over(rates))
        journal.value(f"Djinn / {name}", "×", own[batch] / mean(rates), AHEAD)
        best[batch] = max(best.get(batch, 0.0), mean(rates))
    if len(best) < len(plan.batches) or context.left_s < LEAST_OF_WAY_S[Way.COMPILED]:
        context.journal.note("There was no time for some of Transformers' batches.")
