"""Transformers' `generate` with Accelerate's offload to host memory, on a model of the same shape."""

import gc
from random import Random
from typing import Any

import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM

from app.gpu.loader import choose_device, choose_dtype
from app.model_store.resolve import ResolvedModel
from benchmarks.gpu_check.away import random_tokens
from benchmarks.gpu_check.plan import StreamPlan
from loadgen.weights.offload.generating import generate
from loadgen.weights.timed import Timed, timed

WEIGHT = 0.01
"""Of every parameter. Copies and products take as long as with any other; pages that were never written would be one
page of zeros in a cache."""


def time_accelerate(model: ResolvedModel, plan: StreamPlan, device: str) -> Timed:
    """One session: a prompt, and a few tokens after it; what is slow only once is over before."""
    offloaded = _make(model, device)
    prompts = [random_tokens(Random(1), plan.prompt)]
    if device == "cpu":
        generate(offloaded, [prompts[0][:1]], plan.offload_tokens)
    found = generate(offloaded, prompts, plan.offload_tokens)
    del offloaded
    gc.collect()
    return timed([found["seconds"]], found["token_ids"])


@torch.no_grad()
def _make(model: ResolvedModel, device: str) -> Any:
    target = choose_device(device)
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(model.config, dtype=choose_dtype("auto", target))
    made = made.to_empty(device="cpu").eval()
    for parameter in made.parameters():
        parameter.fill_(WEIGHT)
    return cpu_offload(made, execution_device=target)
