"""Transformers' `generate` with Accelerate's offload to host memory, on a model of the same shape."""

import gc
from random import Random
from typing import Any

import torch
from accelerate import cpu_offload, init_empty_weights
from transformers import AutoModelForCausalLM

from app.gpu.device.hardware import choose_device, choose_dtype
from app.model_store.resolve import ResolvedModel
from benchmarks.engine.away import random_tokens
from benchmarks.engine.loading import transformers_config
from benchmarks.gpu_check.plan import StreamPlan
from loadgen.experiments.weights.generation import Generation, Timed
from loadgen.rivals.offload.generating import generate

WEIGHT = 0.01
"""Of every parameter: copies and products take as long as with any other. Memory that nobody has written to would not
do: it is one page of zeros over and over, and that is in a cache.
"""


def time_accelerate(model: ResolvedModel, plan: StreamPlan, device: str) -> Timed:
    """One session: a prompt, and a few tokens after it. A pass before that has what is slow only once."""
    target = choose_device(device)
    offloaded = _make(model, target)
    prompt = random_tokens(Random(1), plan.prompt)
    generate(offloaded, [prompt[:1]], 1, target)
    found = generate(offloaded, [prompt], plan.offload_tokens, target)
    del offloaded
    gc.collect()
    return Generation(found["token_ids"], [found["seconds"]]).timed()


def _make(model: ResolvedModel, target: torch.device) -> Any:
    """The model itself has no weights: those that it computes with come from a dictionary in host memory."""
    dtype = choose_dtype("auto", target)
    with init_empty_weights():
        made: Any = AutoModelForCausalLM.from_config(transformers_config(model), dtype=dtype).eval()
    weights = {name: torch.full(each.shape, WEIGHT, dtype=dtype) for name, each in made.state_dict().items()}
    return cpu_offload(made, execution_device=target, state_dict=weights)
