"""A decode step on paper reads what the models have, and launches what the code that is served launches."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.roofline.devices import PROCESSORS
from benchmarks.roofline.host import SAMPLINGS, HostPlan, measure_step
from benchmarks.roofline.launches import build_on_meta, decode_launches
from benchmarks.roofline.stages import STAGES
from tests.hugging_face import shape_config

CONTEXT = 1024
build = cache(build_on_meta)


def transformers_parameters(model: str) -> int:
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(shape_config(model))
    return sum(weight.numel() for weight in built.parameters())


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-2-13b"])
def test_a_step_reads_each_weight_that_transformers_has_once(model: str) -> None:
    """In bfloat16; of the embedding it reads rows."""
    stack = build(model)
    launches = decode_launches(stack, 1, CONTEXT, PROCESSORS, SAMPLINGS["greedy"]).graph
    weights = [each.arguments["weight"] for each in launches if each.arguments.get("weight") is not None]
    assert sum(weight.nbytes for weight in weights) == 2 * transformers_parameters(model)
    assert len({id(weight) for weight in weights}) == len(weights)


# The host's part of a step, with a device that takes no time.


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_session_gets_a_token_in_every_step(sampling: str, in_turn: bool) -> None:
    found = measure_step(3, sampling, HostPlan(context=20, steps=30, warm_up=5), in_turn=in_turn)
    assert found.tokens == 3 * 30
    assert 0 < found.p50_us <= found.p99_us
    assert list(found.stages_us) == list(STAGES)
    # One copy each way, and an event behind each of them.
    assert (found.copies, found.events) == (2, 2)
