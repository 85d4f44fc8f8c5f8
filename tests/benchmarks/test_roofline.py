"""A decode step on paper reads what the models have, and launches what the code that is served launches."""

from collections import Counter
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.engine import Engine
from app.messages import Open, Submit, Token
from tests.gpu.kv.tiering import calls_of

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.roofline.devices import LAUNCH_S, PROCESSORS, Device
from benchmarks.roofline.host import SAMPLINGS, HostPlan, measure_step
from benchmarks.roofline.launches import build_on_meta, decode_launches
from benchmarks.roofline.null_device import NullStreams, null_draws, null_engine
from benchmarks.roofline.paper import GRAPH, Kernel, PaperStep, paper_step
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


@pytest.mark.parametrize(("model", "heads", "sessions"), [("llama-3-8b", 32, 128), ("llama-2-13b", 40, 1)])
def test_operations_are_those_of_weights_and_attention(model: str, heads: int, sessions: int) -> None:
    table = build(model).vocab_size * build(model).hidden_size
    weights = transformers_parameters(model) - table
    norms = (2 * build(model).num_layers + 1) * build(model).hidden_size
    attention = 2 * build(model).num_layers * heads * 128 * CONTEXT
    step = paper_step(model, build(model), sessions, CONTEXT, ("greedy", SAMPLINGS["greedy"]))
    assert sum(each.flops for each in step.kernels) == 2 * sessions * (weights - norms + attention)


DEVICE = Device("made up", bytes_per_s=1e12, flops_per_s=1e14)


@pytest.mark.parametrize(
    ("moved", "flops", "launches", "host_s", "holds", "seconds"),
    [
        (10**9, 0, 1, 0.0, "memory", 1e-3 + LAUNCH_S),
        (10**9, 10**12, 1, 0.0, "compute", 1e-2 + LAUNCH_S),
        (10**6, 10**6, 1000, 0.0, "launches", 1e-6 + 1000 * LAUNCH_S),
        (10**9, 0, 1, 0.5, "host", 0.5),
    ],
)
def test_the_bound_that_holds(moved: int, flops: int, launches: int, host_s: float, holds: str, seconds: float) -> None:
    kernels = [Kernel(GRAPH, "one", launches, moved, 0, flops)]
    bound = PaperStep("made up", 1, CONTEXT, "greedy", kernels).bound(DEVICE, host_s)
    assert bound.holds == holds
    assert bound.step_s == pytest.approx(seconds)


# The host's part of a step, with a device that takes no time.

BLOCK = 16


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_session_gets_a_token_in_every_step(sampling: str, in_turn: bool) -> None:
    found = measure_step(3, sampling, HostPlan(context=20, steps=30, warm_up=5), in_turn=in_turn)
    assert found.tokens == 3 * 30
    assert 0 < found.p50_us <= found.p99_us
    assert list(found.stages_us) == list(STAGES)
    # One copy each way, and an event behind each of them.
    assert (found.copies, found.events) == (2, 2)


class Decoding:
    """Sessions that decode on a busy device, a step ahead."""

    def __init__(self, sessions: int, sampling: SamplingParams) -> None:
        self.engine: Engine = null_engine(NullStreams(busy=True), sessions, 200)
        for number in range(sessions):
            session, prompt = SessionId(str(number)), tuple(range(number, number + 5))
            self.engine.handle(Open(Ticket(2 * number), session))
            self.engine.handle(Submit(Ticket(2 * number + 1), session, prompt, sampling, StopRule(150)))
        self.engine.step()
        self.engine.launch()

    def block(self) -> None:
        """So many steps that each session needs a new block once."""
        for _ in range(BLOCK):
            assert not self.engine.overlap()
            told = Counter(type(event) for event in self.engine.collect())
            assert set(told) == {Token}


@pytest.mark.parametrize(("sampling", "most"), [("greedy", 50), ("drawn", 57)])
def test_a_session_that_decodes_costs_the_host_a_few_calls(sampling: str, most: int) -> None:
    """A thousand calls take a tenth of a millisecond or so."""
    counts = []
    for sessions in (8, 64):
        with null_draws():
            decoding = Decoding(sessions, SAMPLINGS[sampling])
            decoding.block()
            counts.append(calls_of(decoding.block))
    few, many = counts
    assert (many - few) / 56 / BLOCK <= most
