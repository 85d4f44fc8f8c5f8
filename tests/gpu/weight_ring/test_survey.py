"""A model taken apart: what its parts take, known before a weight is read, one of them in memory at a time, and all of
them in pinned memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from app.domain.errors import FieldOutOfRange
from app.gpu.attention.reference import ReferenceAttention
from app.gpu.device.streams import CpuStreams
from app.gpu.linear.dense import DenseLinear
from app.gpu.models import build_stack
from app.gpu.weight_ring.fill import FillText
from app.gpu.weight_ring.pinned_store import PinnedStore
from app.gpu.weight_ring.survey import Survey, survey
from app.gpu.weights.source import weights_of
from app.model_store.resolve import ResolvedModel
from tests.gpu.device.deferring import DeferredDevice
from tests.gpu.models.oracle import CASES, tiny_config
from tests.gpu.weight_files.bundles import Model, make_model, same_bits

LLAMA_3_70B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
GPT2_XL: dict[str, Any] = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}


def surveyed(fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Survey:
    return survey(
        ResolvedModel("large", AutoConfig.for_model(**fields), None, 0), dtype, DenseLinear, ReferenceAttention(), None
    )


@pytest.mark.parametrize("fields", [LLAMA_3_70B, SMOLLM2_135M, GPT2_XL], ids=["llama-3-70b", "smollm2", "gpt2-xl"])
def test_all_parameters_are_there_in_parts_no_larger_than_a_layer(fields: dict[str, Any]) -> None:
    found = surveyed(fields)
    with torch.device("meta"):
        oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    parameters = sum(parameter.numel() for parameter in oracle.parameters())
    if oracle.config.tie_word_embeddings:  # a table, and part of every pass
        parameters += oracle.lm_head.weight.numel()
    in_bundles = sum(piece.nbytes for layout in found.layouts for piece in layout.pieces)
    in_tables = sum(table.nbytes for table in found.tables)
    assert in_bundles + in_tables == parameters * 2
    sizes = [layout.nbytes for layout in found.layouts]
    assert max(sizes) == sizes[0], "no part is larger than a layer"
    assert len(sizes) > oracle.config.num_hidden_layers + 2  # the output projection is in parts


def test_parts_of_an_output_projection_that_is_far_larger_than_a_layer_do_not_become_tiny() -> None:
    slim = {**SMOLLM2_135M, "hidden_size": 36, "intermediate_size": 4, "vocab_size": 10_000}
    parts = surveyed(slim).layouts[31:]
    rows = [layout.pieces[0].shape[0] for layout in parts]
    assert rows[0] == 64 * (rows[0] // 64) >= 64
    assert sum(rows) == 10_000


@pytest.mark.parametrize("case", ["gpt_neox", "gemma", "mixtral"])
def test_a_model_that_runs_on_transformers_modules_is_refused(case: str) -> None:
    with pytest.raises(FieldOutOfRange, match=f"'{case}' runs on Transformers' modules") as refused:
        survey(ResolvedModel(case, tiny_config(case), None, 0), torch.float32, DenseLinear, ReferenceAttention(), None)
    assert refused.value.param == "weights_device"
    assert "llama, mistral, qwen2" in refused.value.message


class _Watch:
    """A `Writer` that sees what is left of earlier bundles."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Tensor]] = []
        self.left: list[int] = []

    def bundle(self, index: int, tensors: Sequence[Tensor]) -> None:
        self.left.append(sum(tensor() is not None for tensor in self._seen))
        self._seen += map(weakref.ref, tensors)

    def table(self, index: int, matrix: Tensor) -> None:
        pass


@pytest.mark.parametrize("case", ["qwen3", "gpt2"])
def test_one_bundle_is_in_memory_at_a_time(case: str) -> None:
    model = ResolvedModel(case, AutoConfig.for_model(**CASES[case]), None, seed=0)
    watch = _Watch()
    source = weights_of(model, torch.device("cpu"), torch.float32)
    build_stack(model, source, FillText(watch, torch.float32, DenseLinear), ReferenceAttention(), None)
    assert watch.left == [0] * (3 + 1 + 1)  # layers, norm, output projection


MODEL = make_model()


class NotingStreams(CpuStreams):
    """Notes the slabs."""

    def __init__(self) -> None:
        super().__init__()
        self.slabs: list[weakref.ref[Tensor]] = []

    def host_slab(self, shape: tuple[int, ...]) -> Tensor:
        slab = super().host_slab(shape)
        self.slabs.append(weakref.ref(slab))
        return slab


def filled(streams: CpuStreams | DeferredDevice, model: Model = MODEL, chunk_bytes: int = 1000) -> PinnedStore:
    store = PinnedStore(model.contents.layouts, model.contents.tables, streams, chunk_bytes)
    model.fill(store)
    return store


def test_rows_are_gathered() -> None:
    store = filled(CpuStreams())
    for ids in ([], [3], [39, 0, 39, 4, 5]):
        wanted = torch.tensor(ids, dtype=torch.int64)
        assert same_bits(store.rows(0, wanted), MODEL.tables[0][wanted])
        assert same_bits(store.rows(1, wanted % 9), MODEL.tables[1][wanted % 9])
    for row in (-1, 40):
        with pytest.raises(IndexError):
            store.rows(0, torch.tensor([row]))


def test_more_memory_than_is_free_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, needed = NotingStreams(), 3 << 30
    large = [torch.empty(needed // 4, device="meta")]
    contents = Model([large], []).contents
    free = psutil.virtual_memory()._replace(available=2 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(FieldOutOfRange, match=r"no memory for 3\.0 GiB .* 2\.0 GiB of host memory are free") as refused:
        PinnedStore(contents.layouts, (), streams, 1000)
    assert refused.value.param == "weights_device"
    assert streams.slabs == []


def test_the_slab_lives_as_long_as_the_store() -> None:
    """Its memory is pinned until the tensor is gone, whoever else holds a view of it."""
    streams = NotingStreams()
    store = filled(streams)
    gc.collect()
    [slab] = streams.slabs
    assert slab() is not None
    store.close()
    gc.collect()
    assert slab() is None


def test_closing_waits_for_what_has_been_launched() -> None:
    device, target = DeferredDevice(0, late="weights"), MODEL.target(0)
    store = filled(device)
    store.load(0, target, ())
    store.close()
    assert MODEL.holds(0, target)
