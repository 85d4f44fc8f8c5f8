"""Tensors of GGUF files have the values that Transformers' own reader gives them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, GgufConfig

from app.gpu.attention.reference import ReferenceAttention
from app.gpu.linear.matrix import BlockMatrix, Matrix, dense_of
from app.gpu.models import load_stack
from app.gpu.weights.form import Form
from app.gpu.weights.gguf_file import GgufFile
from app.gpu.weights.source import weights_of
from app.model_store.errors import BrokenModel
from app.model_store.gguf.index import weight_files
from app.model_store.resolve import ResolvedModel, resolve
from app.settings import Settings
from tests.gpu.models.driving import Drive, assert_agrees
from tests.gpu.models.oracle import expect
from tests.model_store.tiny_gguf import tiny_llama, tiny_model, tiny_tokenizer, write_gguf

CPU = torch.device("cpu")
NOTHING = re.compile(r"(?!)")
MAPS = Path("/proc/self/maps")
KINDS = [("llama", "F32"), ("llama", "F16"), ("qwen2", "BF16"), ("llama", "Q4_1"), ("qwen2", "Q8_0"), ("qwen3", "Q4_1")]
TOKENIZER = tiny_tokenizer()


def write(path: Path, model_type: str = "llama", kind: str = "Q4_1") -> ResolvedModel:
    vocab_size = TOKENIZER.get_vocab_size()
    model = tiny_llama(vocab_size) if model_type == "llama" else tiny_model(model_type, vocab_size)
    write_gguf(path / "m.gguf", model, TOKENIZER, kind=GGMLQuantizationType[kind])
    return resolve(str(path / "m.gguf"), cache_dir=path / "cache")


def source_of(model: ResolvedModel, dtype: torch.dtype = torch.float32) -> GgufFile:
    source = weights_of(model, CPU, dtype)
    assert isinstance(source, GgufFile)
    return source


def assert_values_of_transformers(model: ResolvedModel, file: Path) -> list[Matrix]:
    """Returns the matrices."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    source, matrices = source_of(model), []
    for name, parameter in loaded.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(source.take(name, tuple(parameter.shape)), parameter), name
        else:
            matrix = source.take_matrix(name, tuple(parameter.shape))
            assert torch.equal(dense_of(matrix).float(), parameter), name
            matrices.append(matrix)
    source.finish(NOTHING)
    return matrices


@pytest.mark.parametrize(("model_type", "kind"), KINDS)
def test_tensors_have_the_values_of_transformers(tmp_path: Path, model_type: str, kind: str) -> None:
    matrices = assert_values_of_transformers(write(tmp_path, model_type, kind), tmp_path / "m.gguf")
    kept = {each.kind if isinstance(each, BlockMatrix) else each.dtype for each in matrices}
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    assert kept == {stored.get(kind, kind)}


@pytest.mark.long
@pytest.mark.model
def test_tensors_of_smollm2_have_the_values_of_transformers_in_a_sixth_of_the_bytes() -> None:
    model = resolve("smollm2-135m-instruct", cache_dir=Settings().cache_dir.expanduser())
    assert model.folder is not None
    matrices = assert_values_of_transformers(model, weight_files(model.folder)[0])
    assert all(isinstance(each, BlockMatrix) for each in matrices)


def test_a_computation_in_half_precision_gets_all_tensors_so_from_a_file_that_is_not_mapped(tmp_path: Path) -> None:
    model = write(tmp_path)
    name, shape = "model.layers.0.self_attn.k_proj.weight", (32, 64)
    whole, matrix = source_of(model).take(name, shape), source_of(model).take_matrix(name, shape)
    half = source_of(model, torch.bfloat16).take_matrix(name, shape)
    assert not MAPS.exists() or "m.gguf" not in MAPS.read_text()
    assert isinstance(matrix, BlockMatrix)
    assert isinstance(half, torch.Tensor)
    assert torch.equal(half, whole.bfloat16())


def test_a_file_that_is_cut_short_or_gone_and_a_broken_index_are_refused(tmp_path: Path) -> None:
    source, file = source_of(write(tmp_path)), tmp_path / "m.gguf"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(BrokenModel, match=r"m\.gguf has changed: it has 5000 bytes, not \d+"):
        source.take("model.norm.weight", (64,))
    file.unlink()
    with pytest.raises(BrokenModel, match=r"cannot read .*m\.gguf: No such file"):
        source.take("model.layers.0.input_layernorm.weight", (64,))
    (tmp_path / "gguf.json").write_text('{"file": "m.gguf"}')
    with pytest.raises(BrokenModel, match=r"gguf\.json"):
        GgufFile(tmp_path, Form(CPU, torch.float32))


def test_a_tensor_that_is_not_there_or_has_another_shape_is_named(tmp_path: Path) -> None:
    source = source_of(write(tmp_path))
    with pytest.raises(BrokenModel, match=r"no tensor 'lm_head\.weight'"):
        source.take("lm_head.weight", (64, 64))
    with pytest.raises(BrokenModel, match=r"'model\.norm\.weight' in .* is \(64,\), must be \(48,\)"):
        source.take("model.norm.weight", (48,))
    with pytest.raises(BrokenModel, match=r"no use for model\.embed_tokens\.weight"):
        source.finish(re.compile(r"norm|proj"))


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_model_in_blocks_agrees_with_transformers_and_is_never_dense(tmp_path: Path, model_type: str) -> None:
    model, tokens = write(tmp_path, model_type), torch.arange(3, 40)
    oracle: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    stack = load_stack(model, device=CPU, dtype=torch.float32, attention=ReferenceAttention())
    [found] = Drive(stack, [tokens]).run([{0: len(tokens)}])
    assert_agrees(found, expect(oracle, tokens))
    assert stack.parameter_bytes < sum(parameter.nbytes for parameter in oracle.parameters()) / 4
