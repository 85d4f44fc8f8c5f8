"""Models whose weights come and go compute the bits of models whose weights stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from app.gpu.attention.reference import ReferenceAttention
from app.gpu.models import load_stack
from app.model_store.resolve import ResolvedModel
from tests.gpu.models.driving import Drive, assert_agrees
from tests.gpu.models.lending import CPU, lend
from tests.gpu.models.oracle import CASES, VOCAB, build_model, expect, save_model

WIDE = 1000
"""A vocabulary whose output projection is larger than a layer of the tiny models."""
OWN = [case for case, fields in CASES.items() if fields["model_type"] in ("llama", "mistral", "qwen2", "qwen3", "gpt2")]
OWN.append("smollm3")
LENGTHS = (13, 9)
STEPS = [{0: 9}, {0: 1, 1: 6}, {0: 1, 1: 1}, {1: 1}, {0: 2, 1: 1}]
SEQUENCES = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def wide(case: str, folder: Path, vocab_size: int = WIDE) -> ResolvedModel:
    config = AutoConfig.for_model(**{**CASES[case], "vocab_size": vocab_size})
    save_model(build_model(config), folder)
    return ResolvedModel(case, config, folder, seed=0)


def assert_same_bits(model: ResolvedModel, dtype: torch.dtype, *, batch_invariant: bool = False) -> None:
    resident = load_stack(
        model, device=CPU, dtype=dtype, attention=ReferenceAttention(), batch_invariant=batch_invariant
    )
    lent, _ = lend(model, dtype, batch_invariant=batch_invariant)
    expected = Drive(resident, SEQUENCES).run(STEPS)
    for found, wanted in zip(Drive(lent, SEQUENCES).run(STEPS), expected, strict=True):
        pairs = zip((*found.boundaries, found.logits), (*wanted.boundaries, wanted.logits), strict=True)
        for boundary, (ours, theirs) in enumerate(pairs):
            assert theirs.isfinite().all()
            assert torch.equal(ours, theirs), f"boundary {boundary}"
    assert lent.parameter_bytes == resident.parameter_bytes


@pytest.mark.parametrize("vocab_size", [VOCAB, WIDE])
@pytest.mark.parametrize("case", OWN)
def test_lent_weights_give_the_same_bits(case: str, vocab_size: int, tmp_path: Path) -> None:
    assert_same_bits(wide(case, tmp_path, vocab_size), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["llama", "qwen3", "gpt2"])
def test_lent_weights_give_the_same_bits_in_half_precision(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert_same_bits(wide(case, tmp_path), dtype)


def test_lent_weights_give_the_same_bits_where_batches_do_not_matter(tmp_path: Path) -> None:
    assert_same_bits(wide("qwen2", tmp_path), torch.float32, batch_invariant=True)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_random_weights_are_lent_as_well(case: str) -> None:
    assert_same_bits(ResolvedModel(case, AutoConfig.for_model(**CASES[case]), None, seed=3), torch.float32)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_a_pass_uses_every_bundle_once_and_in_order(case: str, tmp_path: Path) -> None:
    stack, text = lend(wide(case, tmp_path), torch.float32)
    Drive(stack, SEQUENCES[:1]).run([{0: 5}])
    assert text.used == list(range(text.used[-1] + 1))
    assert text.used[-1] > stack.num_layers + 1  # the norm, and more than one part of the output projection


@pytest.mark.parametrize("case", ["llama", "llama-tied-biased-wide-heads", "gpt2"])
def test_an_output_projection_in_parts_agrees_with_transformers(case: str, tmp_path: Path) -> None:
    model = wide(case, tmp_path)
    stack = load_stack(model, device=CPU, dtype=torch.float32, attention=ReferenceAttention())
    found = Drive(stack, SEQUENCES).run(STEPS)
    for tokens, result in zip(SEQUENCES, found, strict=True):
        assert_agrees(result, expect(build_model(model.config), tokens))
