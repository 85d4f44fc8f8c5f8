"""Which devices multiply matrices as what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.domain.errors import FieldOutOfRange
from app.domain.values import WeightsDtype
from app.gpu.startup.weights_dtype import require_float8, require_weights_dtype
from app.model_store.resolve import ResolvedModel
from tests.gpu.models.oracle import tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LLAMA = ResolvedModel("tiny", tiny_config("llama"), None, 0)


def model_of(case: str, asked: WeightsDtype) -> ResolvedModel:
    return replace(LLAMA, config=tiny_config(case), weights_dtype=asked)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama", "gpt2", "gpt_neox"])
def test_a_checkpoint_is_taken_everywhere(case: str, dtype: torch.dtype, device: torch.device) -> None:
    require_weights_dtype(model_of(case, WeightsDtype.CHECKPOINT), device, dtype)


@pytest.mark.parametrize(
    ("case", "device", "dtype"),
    [
        ("llama", CPU, torch.float32),
        ("gpt2", CPU, torch.float32),
        ("llama", CUDA, torch.bfloat16),
        ("llama", CUDA, torch.float16),
    ],
)
def test_int8_is_taken_where_it_is_multiplied(case: str, device: torch.device, dtype: torch.dtype) -> None:
    require_weights_dtype(model_of(case, WeightsDtype.INT8), device, dtype)


@pytest.mark.parametrize(
    ("case", "asked", "device", "dtype", "why"),
    [
        ("llama", WeightsDtype.INT8, CPU, torch.bfloat16, "cpu multiplies matrices as bfloat16"),
        ("llama", WeightsDtype.INT8, CUDA, torch.float32, "cuda multiplies float32 with float32"),
        ("llama", WeightsDtype.BFLOAT16, CUDA, torch.float16, "cuda multiplies matrices as float16"),
        ("gpt2", WeightsDtype.INT8, CUDA, torch.bfloat16, "'gpt2' are stored with their inputs as rows"),
        ("gpt_neox", WeightsDtype.INT8, CUDA, torch.bfloat16, "Transformers' modules"),
        ("llama", WeightsDtype.FLOAT8, CPU, torch.float32, "float8 needs a GPU of compute capability 8.9 or newer"),
    ],
)
def test_what_is_not_multiplied_so_is_refused(
    case: str, asked: WeightsDtype, device: torch.device, dtype: torch.dtype, why: str
) -> None:
    with pytest.raises(FieldOutOfRange, match=why) as refused:
        require_weights_dtype(model_of(case, asked), device, dtype)
    assert refused.value.param == "weights_dtype"


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_float8_is_taken_by_devices_that_have_it(capability: tuple[int, int]) -> None:
    require_float8(CUDA, torch.bfloat16, capability)


@pytest.mark.parametrize(
    ("dtype", "capability", "why"),
    [
        (torch.bfloat16, (8, 6), "8.9 or newer; cuda has 8.6"),
        (torch.bfloat16, None, "8.9 or newer; cuda"),
        (torch.float16, (9, 0), "dtype bfloat16; got float16"),
    ],
)
def test_float8_is_refused_by_others(dtype: torch.dtype, capability: tuple[int, int] | None, why: str) -> None:
    with pytest.raises(FieldOutOfRange, match=why):
        require_float8(CUDA, dtype, capability)
