"""As what matrices are kept: stored, widened, or rounded as gguf and PyTorch round."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file

from app.domain.errors import FieldOutOfRange
from app.domain.values import WeightsDtype
from app.gpu.linear.matrix import BlockMatrix, Matrix, dense_of
from app.gpu.weights.form import Form, nbytes_of
from app.gpu.weights.random_weights import RandomWeights
from app.gpu.weights.safetensors_folder import SafetensorsFolder
from app.model_store.fingerprint import fingerprint
from app.model_store.resolve import ResolvedModel
from app.model_store.sizes import stored_sizes
from tests.gpu.models.oracle import tiny_config

CPU = torch.device("cpu")
STORED = torch.randn(6, 64, generator=torch.Generator().manual_seed(5)).bfloat16()


def stored_as(folder: Path, matrices: WeightsDtype, dtype: torch.dtype = torch.float32) -> Matrix:
    save_file({"a.weight": STORED}, folder / "model.safetensors")
    return SafetensorsFolder(folder, Form(CPU, dtype, matrices)).take_matrix("a.weight", (6, 64))


def rounded(values: torch.Tensor) -> torch.Tensor:
    """To Q8_0 and back."""
    kind = gguf.GGMLQuantizationType.Q8_0
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind))


@pytest.mark.parametrize(
    ("matrices", "dtype"),
    [
        (WeightsDtype.CHECKPOINT, torch.bfloat16),
        (WeightsDtype.FLOAT32, torch.float32),
        (WeightsDtype.BFLOAT16, torch.bfloat16),
    ],
)
def test_a_stored_matrix_keeps_its_values(tmp_path: Path, matrices: WeightsDtype, dtype: torch.dtype) -> None:
    found = dense_of(stored_as(tmp_path, matrices))
    assert found.dtype is dtype
    assert torch.equal(found.float(), STORED.float())


def test_int8_rounds_as_gguf_does(tmp_path: Path) -> None:
    found = stored_as(tmp_path, WeightsDtype.INT8)
    assert isinstance(found, BlockMatrix)
    assert torch.equal(found.dequantize(), rounded(STORED.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("matrices", list(WeightsDtype))
def test_bytes_are_known_beforehand(tmp_path: Path, matrices: WeightsDtype, dtype: torch.dtype) -> None:
    found = stored_as(tmp_path, matrices, dtype)
    [size] = stored_sizes(tmp_path).values()
    assert Form(CPU, dtype, matrices).nbytes(size) == nbytes_of(found)


def test_a_computation_in_half_precision_gets_matrices_so(tmp_path: Path) -> None:
    assert dense_of(stored_as(tmp_path, WeightsDtype.CHECKPOINT, torch.float16)).dtype is torch.float16


@pytest.mark.parametrize("matrices", [WeightsDtype.BFLOAT16, WeightsDtype.INT8])
def test_random_matrices_are_those_of_the_seed_rounded(matrices: WeightsDtype) -> None:
    config, shape = tiny_config("llama"), (8, 64)
    plain = RandomWeights(3, config, Form(CPU, torch.float32)).take_matrix("a.weight", shape)
    found = RandomWeights(3, config, Form(CPU, torch.float32, matrices)).take_matrix("a.weight", shape)
    expected = dense_of(plain).bfloat16() if matrices is WeightsDtype.BFLOAT16 else rounded(dense_of(plain))
    assert torch.equal(dense_of(found), expected)


@pytest.mark.parametrize(("matrices", "step", "inputs"), [(WeightsDtype.INT8, 32, 48), (WeightsDtype.FLOAT8, 16, 24)])
def test_a_matrix_whose_rows_have_no_whole_blocks_is_named(matrices: WeightsDtype, step: int, inputs: int) -> None:
    source = RandomWeights(3, tiny_config("llama"), Form(CPU, torch.float32, matrices))
    with pytest.raises(FieldOutOfRange, match=rf"multiple of {step} values; a\.weight has {inputs}") as caught:
        source.take_matrix("a.weight", (8, inputs))
    assert caught.value.param == "weights_dtype"


def test_rounded_matrices_make_another_model() -> None:
    def print_of(matrices: WeightsDtype) -> str:
        return fingerprint(ResolvedModel("tiny", tiny_config("llama"), None, 0, matrices))

    same = {print_of(WeightsDtype.CHECKPOINT), print_of(WeightsDtype.FLOAT32)}
    assert len(same) == 1
    assert len(same | set(map(print_of, WeightsDtype))) == 4
