"""Every stack against Transformers: the same logits, and the same hidden state at every boundary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.gpu.attention.reference import ReferenceAttention
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.model_store.resolve import ResolvedModel
from tests.gpu.models.driving import Drive, assert_agrees
from tests.gpu.models.oracle import CASES, VOCAB, build_model, expect, save_model, tiny_config
from tests.gpu.oracle import RoundingCache

CPU = torch.device("cpu")


def load(folder: Path, case: str, dtype: torch.dtype = torch.float32) -> LayerStack:
    model = ResolvedModel(case, tiny_config(case), folder, seed=0)
    return load_stack(model, device=CPU, dtype=dtype, attention=ReferenceAttention())


def sequence(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Pair:
    """A stack, and the Transformers model with the same weights."""

    stack: LayerStack
    oracle: Any


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case: str = request.param
    oracle = build_model(tiny_config(case))
    return Pair(load(save_model(oracle, tmp_path_factory.mktemp(case)), case), oracle)


@pytest.mark.parametrize("chunks", [[40], [7, 16, 17]], ids=["one-prefill", "chunked-prefill"])
def test_prefill_agrees_with_transformers(pair: Pair, chunks: list[int]) -> None:
    tokens = sequence(sum(chunks))
    [found] = Drive(pair.stack, [tokens]).run([{0: chunk} for chunk in chunks])
    assert_agrees(found, expect(pair.oracle, tokens))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_kv_of_a_smaller_type_is_that_of_a_cache_that_rounds(pair: Pair, kv_dtype: torch.dtype) -> None:
    """In every part of a prompt and after it, the keys and values of a step's own tokens included."""
    tokens = sequence(40)
    [found] = Drive(pair.stack, [tokens], kv_dtype).run([{0: 7}, {0: 30}, {0: 1}, {0: 2}])
    expected, exact = expect(pair.oracle, tokens, RoundingCache(kv_dtype)), expect(pair.oracle, tokens)
    off, of_rounding = (float((each.logits - expected.logits).norm()) for each in (found, exact))
    assert off < 0.2 * of_rounding


def test_packed_decode_of_unequal_sequences_agrees_with_transformers(pair: Pair) -> None:
    sequences = [sequence(31, seed=1), sequence(12, seed=2), sequence(20, seed=3)]
    prefill = [{0: 25, 1: 6}, {0: 1, 1: 1, 2: 15}]
    decode = [{0: 1, 1: 1, 2: 1}] * 5
    found = Drive(pair.stack, sequences).run(prefill + decode)
    for tokens, result in zip(sequences, found, strict=True):
        assert_agrees(result, expect(pair.oracle, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["llama", "qwen3", "gpt2", "gpt_neox"])
def test_half_precision_stays_close(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    oracle = build_model(tiny_config(case))
    stack = load(save_model(oracle, tmp_path), case, dtype)
    tokens = sequence(20)
    [found] = Drive(stack, [tokens]).run([{0: 18}, {0: 1}, {0: 1}])
    assert {boundary.dtype for boundary in found.boundaries} == {dtype}
    assert found.logits.dtype == torch.float32
    assert_agrees(found, expect(oracle, tokens), tolerance=0.1 if dtype == torch.bfloat16 else 0.02)
