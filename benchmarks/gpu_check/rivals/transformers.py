"""Transformers' own `generate` on a model of the same shape: static cache, plain and compiled."""

import gc
from collections.abc import Iterator
from enum import StrEnum
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.away import random_tokens
from benchmarks.engine.loading import find_model, transformers_config
from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.plan import DecodePlan
from loadgen.rivals.step_times import StepTimes


class Way(StrEnum):
    """How its decode step runs. Compiled: as `generate` does it by itself where a static cache is on a GPU."""

    PLAIN = "static cache"
    COMPILED = "static cache, compiled"


LEAST_S = {Way.PLAIN: 8.0, Way.COMPILED: 25.0}
"""With less time than that a batch is not begun: the first of a compiled one may take most of a minute."""


def rates_of_transformers(context: StageContext, plan: DecodePlan) -> Iterator[tuple[Way, int, list[float]]]:
    """Tokens a second of every batch, plain ones first, each as soon as it is known."""
    model = _make_model(plan.model, context.device)
    on_gpu = context.device == "cuda"
    for way in Way if on_gpu else (Way.PLAIN,):
        for batch in plan.batches:
            if context.left_s > LEAST_S[way]:
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
