"""Models whose matrices keep the checkpoint's type: the bits of float32 weights with the same values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoConfig, PretrainedConfig

from app.domain.values import WeightsDtype
from app.gpu.attention.reference import ReferenceAttention
from app.gpu.linear.matrix import dense_of
from app.gpu.models import build_stack
from app.gpu.models.base import LayerStack
from app.gpu.weight_ring.fill import FillText
from app.gpu.weight_ring.survey import MetaWeights
from app.gpu.weights.resident import ResidentText
from app.gpu.weights.source import weights_of
from app.model_store.resolve import ResolvedModel, resolve
from tests.gpu.models.driving import Drive, assert_agrees
from tests.gpu.models.lending import CPU, LendingText, Shelf, streamed_linear
from tests.gpu.models.oracle import CASES, VOCAB, build_model, expect, save_model
from tests.gpu.models.stored_types import Keep, Storing, as_dtype, in_blocks
from tests.model_store.tiny_gguf import tiny_llama, tiny_tokenizer, write_gguf

OWN = ["llama", "llama-tied-biased-wide-heads", "qwen2", "qwen3", "gpt2"]
WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "n_embd": 64}
"""Whole blocks."""
LENGTHS = (41, 9)
STEPS = [{0: 33}, {0: 1, 1: 6}, {0: 1, 1: 1}, {0: 6, 1: 2}]
SEQUENCES = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
FLOAT32 = torch.float32


def config_of(case: str) -> PretrainedConfig:
    fields = CASES[case]
    config: PretrainedConfig = AutoConfig.for_model(**{**fields, **{k: v for k, v in WIDTHS.items() if k in fields}})
    return config


def saved(case: str, folder: Path) -> ResolvedModel:
    save_model(build_model(config_of(case)), folder)
    return ResolvedModel(case, config_of(case), folder, seed=0)


def resident(model: ResolvedModel, keep: Keep, dtype: torch.dtype = FLOAT32) -> LayerStack:
    source = Storing(weights_of(model, CPU, dtype), keep)
    return build_stack(model, source, ResidentText(CPU, dtype, batch_invariant=False), ReferenceAttention(), None)


def lent(model: ResolvedModel, keep: Keep) -> LayerStack:
    """The model, whose weights are in memory only while it uses them."""
    shelf, attention = Shelf(), ReferenceAttention()
    filling = FillText(shelf, FLOAT32, streamed_linear(FLOAT32))
    build_stack(model, Storing(weights_of(model, CPU, FLOAT32), keep), filling, attention, None)
    shapes = Storing(MetaWeights(weights_of(model, CPU, FLOAT32), FLOAT32), keep)
    return build_stack(model, shapes, LendingText(shelf, FLOAT32, batch_invariant=False), attention, None)


def assert_same_bits(found: LayerStack, wanted: LayerStack) -> None:
    pairs = zip(Drive(found, SEQUENCES).run(STEPS), Drive(wanted, SEQUENCES).run(STEPS), strict=True)
    for ours, theirs in pairs:
        assert theirs.logits.isfinite().all()
        assert torch.equal(ours.logits, theirs.logits)


KEEPS = {
    "bfloat16": as_dtype(torch.bfloat16),
    "float16": as_dtype(torch.float16),
    **{kind: in_blocks(kind) for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_1")},
}


@torch.no_grad()
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
@pytest.mark.parametrize("case", OWN)
def test_stored_matrices_give_the_bits_of_float32(case: str, keep: Keep, tmp_path: Path) -> None:
    model = saved(case, tmp_path)
    assert_same_bits(resident(model, keep), resident(model, lambda name, matrix: dense_of(keep(name, matrix)).float()))
    assert_same_bits(lent(model, keep), resident(model, keep))


@torch.no_grad()
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
@pytest.mark.parametrize("case", ["llama", "llama-tied-biased-wide-heads", "gpt2"])
def test_stored_matrices_agree_with_transformers(case: str, keep: Keep, tmp_path: Path) -> None:
    model, oracle = saved(case, tmp_path), build_model(config_of(case))
    for name, parameter in oracle.named_parameters():
        if parameter.dim() > 1:
            parameter.copy_(dense_of(keep(name, parameter.data)))
    results = Drive(resident(model, keep), SEQUENCES).run(STEPS)
    for tokens, found in zip(SEQUENCES, results, strict=True):
        assert_agrees(found, expect(oracle, tokens))


@torch.no_grad()
def test_a_model_that_computes_in_a_half_type_takes_matrices_of_another(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    stack = resident(model, lambda name, matrix: dense_of(matrix).float(), torch.bfloat16)
    assert_same_bits(stack, resident(model, as_dtype(torch.bfloat16), torch.bfloat16))


@torch.no_grad()
@pytest.mark.parametrize("weights_dtype", WeightsDtype)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_checkpoint_that_is_streamed_gives_the_bits_of_one_that_is_not(
    stored: torch.dtype, weights_dtype: WeightsDtype, tmp_path: Path
) -> None:
    save_model(build_model(config_of("llama")).to(stored), tmp_path)
    model = ResolvedModel("llama", config_of("llama"), tmp_path, seed=0, weights_dtype=weights_dtype)
    assert_streams_alike(model)


@torch.no_grad()
def test_a_gguf_file_that_is_streamed_gives_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    write_gguf(tmp_path / "m.gguf", tiny_llama(tokenizer.get_vocab_size()), tokenizer, kind=GGMLQuantizationType.Q4_1)
    assert_streams_alike(resolve(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "cache"))


def assert_streams_alike(model: ResolvedModel) -> None:
    """What is said of matrices before they are read is what is read."""
    shelf, attention = Shelf(), ReferenceAttention()
    text, source = ResidentText(CPU, FLOAT32, batch_invariant=False), weights_of(model, CPU, FLOAT32)
    kept = build_stack(model, source, text, attention, None)
    read = weights_of(model, CPU, FLOAT32)
    build_stack(model, read, FillText(shelf, FLOAT32, streamed_linear(FLOAT32)), attention, None)
    said = MetaWeights(weights_of(model, CPU, FLOAT32), FLOAT32)
    assert_same_bits(
        build_stack(model, said, LendingText(shelf, FLOAT32, batch_invariant=False), attention, None), kept
    )
    assert said.nbytes == read.nbytes
