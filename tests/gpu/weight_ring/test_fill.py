"""A model taken apart: every bundle as it will be streamed, one at a time."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from app.gpu.attention.reference import ReferenceAttention
from app.gpu.models import build_stack
from app.gpu.weight_files.layout import Piece
from app.gpu.weight_ring.fill import FillText
from app.gpu.weight_ring.survey import survey
from app.gpu.weights.source import weights_of
from app.model_store.errors import BrokenModel
from app.model_store.resolve import ResolvedModel
from tests.gpu.models.lending import CPU, Shelf, fill, streamed_linear
from tests.gpu.models.oracle import CASES, build_model, save_model, tiny_config


def saved(case: str, folder: Path) -> ResolvedModel:
    with torch.no_grad():
        save_model(build_model(tiny_config(case)), folder)
    return ResolvedModel(case, tiny_config(case), folder, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["llama", "llama-tied-biased-wide-heads", "qwen2", "qwen3", "smollm3", "gpt2"])
def test_what_is_written_lies_as_the_survey_has_it(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved(case, tmp_path)
    found, shelf = survey(model, dtype, streamed_linear(dtype), ReferenceAttention(), None), fill(model, dtype)
    assert found.layouts == shelf.layouts
    assert found.tables == [Piece(tuple(table.shape), table.dtype, 0) for table in shelf.tables]


def test_a_stored_output_projection_is_written_though_the_config_ties(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    model.config.tie_word_embeddings = True
    shelf = fill(model, torch.float32)
    [embedding] = shelf.tables
    assert not torch.equal(torch.cat(shelf.layouts[-1].views(shelf.bundles[-1])), embedding)


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
    source = weights_of(model, CPU, torch.float32)
    build_stack(
        model, source, FillText(watch, torch.float32, streamed_linear(torch.float32)), ReferenceAttention(), None
    )
    assert watch.left == [0] * (3 + 1 + 1)  # layers, norm, output projection


def test_weights_that_do_not_fit_the_model_are_refused_as_ever(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    model.config.intermediate_size = 81
    with pytest.raises(BrokenModel, match=r"gate_proj.* is \(80, 48\), must be \(81, 48\)"):
        fill(model, torch.float32)


def test_a_model_that_was_taken_apart_computes_nothing() -> None:
    model = ResolvedModel("llama", tiny_config("llama"), None, seed=0)
    source = weights_of(model, CPU, torch.float32)
    stack = build_stack(
        model, source, FillText(Shelf(), torch.float32, streamed_linear(torch.float32)), ReferenceAttention(), None
    )
    with pytest.raises(AssertionError, match="given away"):
        stack.head(torch.zeros(1, 48))
