"""Weights in parts: some stay, two slots stream the others, and KV has the rest. Every pass finds the right weights."""

import itertools
import random
from collections.abc import Iterator, Sequence

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from app.domain.errors import FieldOutOfRange
from app.gpu.device.streams import CpuStreams
from app.gpu.kernels.linear import DenseLinear
from app.gpu.kernels.linear.base import Weight
from app.gpu.models import build_stack
from app.gpu.weights.arena import WeightPlan, lay_out, plan_weights
from app.gpu.weights.bundles import StreamedWeights
from app.gpu.weights.checkpoint import weights_of
from app.gpu.weights.layout import WeightLayout
from app.gpu.weights.stores import PinnedStore
from app.model_store.resolve import ResolvedModel
from tests.gpu.device.deferring import DeferredDevice
from tests.gpu.kernels.attention.reference import ReferenceAttention
from tests.gpu.models.oracle import tiny_config
from tests.gpu.weights.bundles import Model
from tests.hugging_face import shape_config

UNIT = 256

sizes_of_bundles = st.lists(st.integers(1, 200).map(lambda units: units * UNIT), min_size=1, max_size=40)


def streamed_of(plan: WeightPlan) -> tuple[int, ...]:
    """Bundles that are not kept, in the order of use."""
    return tuple(index for index in range(len(plan.sizes)) if index not in plan.kept)


@given(sizes=sizes_of_bundles, share=st.floats(0, 1.5), from_disk=st.booleans())
def test_the_budget_holds_and_is_used_up_to_a_bundle(sizes: list[int], share: float, from_disk: bool) -> None:
    budget = int(share * sum(sizes))
    if budget < (least := min(sum(sizes), 2 * max(sizes))):
        with pytest.raises(FieldOutOfRange, match=f"{least} bytes") as refused:
            plan_weights(sizes, budget, from_disk=from_disk)
        assert refused.value.param == "weights_device"
        return
    plan = plan_weights(sizes, budget, from_disk=from_disk)
    assert plan.device_bytes <= budget
    streamed = streamed_of(plan)
    assert plan.kept <= set(range(len(sizes)))
    assert plan.kept_bytes + plan.streamed_bytes == sum(sizes)
    if streamed:
        assert plan.ring_bytes >= 2 * max(sizes[index] for index in streamed)
        assert budget - plan.device_bytes < max(sizes)
    else:
        assert plan.ring_bytes == 0


CPU = torch.device("cpu")


class Toy:
    """A model that adds its bundles to what it has; in which order it has done so shows."""

    def __init__(self, device: DeferredDevice, rows: Sequence[int], spare: int) -> None:
        """Bundles of so many rows, 64 wide, on a device with `spare` bytes more than a ring of them needs."""
        self.device = device
        generator = torch.Generator().manual_seed(0)
        self.stored = [torch.randn(count, 64, generator=generator) for count in rows]
        self.streamed = StreamedWeights(CPU, torch.float32, DenseLinear)
        self.weights: list[Weight] = []
        for tensor in self.stored:
            with self.streamed.bundle() as bundle:
                self.weights.append(bundle.hold(tensor.to("meta")))
        sizes = [bundle.nbytes for bundle in self.streamed.layout.bundles]
        store = PinnedStore(self.streamed.layout, device, chunk_bytes=512)
        for index, tensor in enumerate(self.stored):
            store.write(f"bundle.{index}", [tensor])
        plan = plan_weights(sizes, 2 * max(sizes) + spare)
        self.streamed.stream_from(store, device, plan)
        self.arena = lay_out(plan, 0, 1)

    def place(self) -> Tensor:
        """Give it memory that the device has yet to clear, and return that."""
        memory = self.device.adopt(torch.full((self.arena.nbytes,), 77, dtype=torch.uint8)).zero_()
        self.streamed.place(memory, self.arena)
        return memory

    def run(self, state: Tensor, bundles: Sequence[int]) -> None:
        for index in bundles:
            with self.streamed.using(index):
                state.mul_(0.5).add_(self.weights[index].tensor.sum(0))

    def expect(self, passes: Sequence[Sequence[int]]) -> Tensor:
        state = torch.zeros(64)
        for index in itertools.chain(*passes):
            state.mul_(0.5).add_(self.stored[index].sum(0))
        return state


def passes_of(count: int, chance: random.Random) -> Iterator[Sequence[int]]:
    """Some of them begin or end anywhere."""
    for _ in range(12):
        lo, hi = sorted((chance.randrange(count), chance.randrange(count + 1)))
        yield chance.choice([range(count), range(lo, hi)])


@given(
    seed=st.integers(0, 10**6),
    late=st.sampled_from([None, "compute", "weights"]),
    rows=st.lists(st.integers(1, 8), min_size=1, max_size=9),
    spare=st.integers(0, 6000),
    lend=st.booleans(),
)
def test_every_pass_finds_its_weights(seed: int, late: str | None, rows: list[int], spare: int, lend: bool) -> None:
    """Also while bundles are lent between passes, and come back."""
    chance, device, lent = random.Random(seed), DeferredDevice(seed, late), 0
    toy, passes = Toy(device, rows, spare), list(passes_of(len(rows), chance))
    wanted = toy.expect(passes)
    with device:
        state = torch.zeros(64)
        memory = toy.place()
        for bundles in passes:
            toy.run(state, bundles)
            if lend and chance.random() < 0.5 and lent < len(toy.arena.lendable):
                place = toy.arena.places[toy.arena.lendable[lent]]
                toy.streamed.lend(toy.arena.lendable[lent])
                memory[place].fill_(99)  # as KV writes there
                lent += 1
            elif lent:
                lent -= 1
                toy.streamed.take_back(toy.arena.lendable[lent])
        device.finish()
    assert torch.equal(state, wanted)


def layout_of(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> WeightLayout:
    model, weights = ResolvedModel("large", config, None, 0), StreamedWeights(CPU, dtype, DenseLinear)
    build_stack(model, weights_of(model, CPU, dtype, on_meta=True), weights, ReferenceAttention(), None)
    return weights.layout


@pytest.mark.parametrize("shape", ["llama-3-70b", "smollm2-135m", "gpt2"])
def test_all_parameters_are_there_in_parts_no_larger_than_a_layer(shape: str) -> None:
    found = layout_of(shape_config(shape))
    with torch.device("meta"):
        oracle = AutoModelForCausalLM.from_config(shape_config(shape))
    parameters = sum(parameter.numel() for parameter in oracle.parameters())
    if oracle.config.tie_word_embeddings:  # a table, and part of every pass
        parameters += oracle.lm_head.weight.numel()
    in_bundles = sum(piece.nbytes for layout in found.bundles for piece in layout.pieces)
    in_tables = sum(table.nbytes for table in found.tables)
    assert in_bundles + in_tables == parameters * 2
    sizes = [layout.nbytes for layout in found.bundles]
    assert max(sizes) == sizes[0], "no part is larger than a layer"
    assert len(sizes) > oracle.config.num_hidden_layers + 2  # the output projection is in parts


@pytest.mark.parametrize("case", ["gpt_neox", "bloom"])
def test_a_model_that_runs_on_transformers_modules_is_refused(case: str) -> None:
    with pytest.raises(FieldOutOfRange, match=f"'{case}' runs on Transformers' modules") as refused:
        layout_of(tiny_config(case), torch.float32)
    assert refused.value.param == "weights_device"
    assert "llama, mamba2, " in refused.value.message


class NoSlabs(CpuStreams):
    """Memory that must not be taken."""

    def host_slab(self, shape: tuple[int, ...]) -> Tensor:
        raise AssertionError(shape)


def test_more_memory_than_is_free_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 3 << 30
    large = [torch.empty(needed // 4, device="meta")]
    free = psutil.virtual_memory()._replace(available=2 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(FieldOutOfRange, match=r"no memory for 3\.0 GiB .* 2\.0 GiB of host memory are free") as refused:
        PinnedStore(Model([large], []).layout, NoSlabs(), 1000)
    assert refused.value.param == "weights_device"
