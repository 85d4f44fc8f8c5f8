"""Weights from a folder: every tensor needed, none left, kept as stored, or rounded as gguf and PyTorch round. Those
of GGUF files have the values that Transformers' own reader gives them.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, LlamaForCausalLM

from app.domain.errors import FieldOutOfRange, UnknownModel
from app.domain.values import WeightsDtype
from app.gpu.kernels.linear.base import BlockMatrix, Matrix, dense_of
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.models.recipe import Recipe
from app.gpu.startup.weights import needed_bytes
from app.gpu.weights.checkpoint import GgufFile, weights_of
from app.gpu.weights.source import RandomWeights, SafetensorsFolder, TensorFormat
from app.model_store.install import BrokenModel
from app.model_store.resolve import ResolvedModel, fingerprint, resolve
from app.model_store.tensors import GgufIndex
from app.settings import Settings
from tests.gpu.kernels.attention.reference import ReferenceAttention
from tests.gpu.models.driving import Drive, assert_agrees
from tests.gpu.models.oracle import build_model, expect, save_model, tiny_config
from tests.model_store.tiny_gguf import tiny_llama, tiny_model, tiny_tokenizer, write_gguf

CPU = torch.device("cpu")
NOTHING = re.compile(r"(?!)")
MAPS = Path("/proc/self/maps")
TOKENS = torch.arange(3, 20)


def load(folder: Path, case: str = "llama") -> LayerStack:
    model = ResolvedModel(case, tiny_config(case), folder, seed=0)
    return load_stack(model, device=CPU, dtype=torch.float32, attention=ReferenceAttention())


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> LlamaForCausalLM:
    """A model, saved to `tmp_path` as one file."""
    model: LlamaForCausalLM = build_model(tiny_config("llama"))
    save_model(model, tmp_path)
    return model


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not tell what a process has mapped")
@pytest.mark.usefixtures("llama")
def test_a_model_that_is_loaded_has_none_of_its_files_mapped(tmp_path: Path) -> None:
    stack = load(tmp_path)
    assert str(tmp_path) not in MAPS.read_text()
    assert stack.num_layers


@torch.no_grad()
def test_a_sharded_bfloat16_folder_loads_as_float32(tmp_path: Path) -> None:
    model = build_model(tiny_config("llama")).bfloat16()
    folder = save_model(model, tmp_path, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    stack = load(folder)
    [found] = Drive(stack, [TOKENS]).run([{0: len(TOKENS)}])
    assert found.logits.dtype == stack.dtype == torch.float32
    oracle = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert_agrees(found, expect(oracle, TOKENS))


@pytest.mark.parametrize(
    ("name", "becomes", "said"),
    [
        ("model.layers.2.self_attn.k_proj.weight", None, "no tensor 'NAME'"),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(48), "no use for: NAME"),
        ("model.norm.weight", torch.ones(7), r"'NAME'.* is \(7,\), must be \(48,\)"),
        ("model.norm.weight", torch.full((48,), torch.nan), "'NAME' in .* not finite as float32"),
        ("model.embed_tokens.weight", 1 / (torch.arange(67.0 * 48).view(67, 48) - 999), "'NAME'.* not finite"),
    ],
    ids=["missing", "left over", "of another shape", "not numbers", "infinite"],
)
@pytest.mark.usefixtures("llama")
def test_tensors_that_are_not_a_models_are_named(tmp_path: Path, name: str, becomes: Tensor | None, said: str) -> None:
    rewrite(tmp_path, lambda tensors: tensors.pop(name) if becomes is None else tensors.update({name: becomes}))
    with pytest.raises(BrokenModel, match=said.replace("NAME", re.escape(name))):
        load(tmp_path)


def test_stored_rotary_frequencies_are_not_needed(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(6) for i in range(3)}
    rewrite(tmp_path, lambda tensors: tensors.update(old))
    load(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama-tied-biased-wide-heads", "gpt2"])
def test_a_checkpoint_of_the_bare_decoder_loads(case: str, tmp_path: Path) -> None:
    model = build_model(tiny_config(case))
    [found] = Drive(load(save_model(model.base_model, tmp_path), case), [TOKENS]).run([{0: len(TOKENS)}])
    assert_agrees(found, expect(model, TOKENS))


@torch.no_grad()
def test_a_stored_output_projection_wins_over_a_config_that_ties(tmp_path: Path) -> None:
    case = "llama-tied-biased-wide-heads"
    save_model(build_model(tiny_config(case)), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.randn(67, 48)}))
    oracle = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    [found] = Drive(load(tmp_path, case), [TOKENS]).run([{0: len(TOKENS)}])
    assert_agrees(found, expect(oracle, TOKENS))


def test_files_that_are_not_there_or_cut_short_are_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsFolder(tmp_path, TensorFormat(CPU, torch.float32))
    folder = save_model(build_model(tiny_config("llama")), tmp_path, max_shard_size="80KB")
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    with pytest.raises(BrokenModel, match="cannot read"):
        load(folder)
    shards[1].unlink()
    with pytest.raises(BrokenModel, match=r"model-00002-of-.*\.safetensors"):
        load(folder)


def test_random_weights_depend_on_seed_and_name_but_not_on_order() -> None:
    one, other = (RandomWeights(3, tiny_config("llama"), TensorFormat(CPU, torch.bfloat16)) for _ in range(2))
    first = one.take("a.weight", (4, 4))
    second = one.take("b.weight", (4, 4))
    assert torch.equal(other.take("b.weight", (4, 4)), second)
    assert torch.equal(other.take("a.weight", (4, 4)), first)
    assert not torch.equal(first, second)
    assert not torch.equal(
        RandomWeights(4, tiny_config("llama"), TensorFormat(CPU, torch.bfloat16)).take("a.weight", (4, 4)), first
    )


# Matrices as they are stored, or rounded.

STORED = torch.randn(6, 64, generator=torch.Generator().manual_seed(5)).bfloat16()


def stored_as(folder: Path, matrices: WeightsDtype, dtype: torch.dtype = torch.float32, a: Tensor = STORED) -> Matrix:
    save_file({"a.weight": a}, folder / "model.safetensors")
    return SafetensorsFolder(folder, TensorFormat(CPU, dtype, matrices)).take_matrix("a.weight", (6, 64))


def rounded(values: torch.Tensor) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType.Q8_0
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind))


def test_a_stored_matrix_keeps_its_values(tmp_path: Path) -> None:
    half, single = torch.bfloat16, torch.float32
    types = {WeightsDtype.CHECKPOINT: half, WeightsDtype.FLOAT32: single, WeightsDtype.BFLOAT16: half}
    for matrices, dtype in types.items():
        torch.testing.assert_close(dense_of(stored_as(tmp_path, matrices)), STORED.to(dtype), rtol=0, atol=0)


def test_int8_rounds_as_gguf_does_and_half_precision_computes_with_nothing_wider(tmp_path: Path) -> None:
    found = stored_as(tmp_path, WeightsDtype.INT8)
    assert isinstance(found, BlockMatrix)
    assert torch.equal(found.dequantize(), rounded(STORED.float()))
    assert dense_of(stored_as(tmp_path, WeightsDtype.CHECKPOINT, torch.float16)).dtype is torch.float16
    with pytest.raises(BrokenModel, match=r"'a\.weight' .* not finite as bfloat16"):
        stored_as(tmp_path, WeightsDtype.INT8, a=STORED / 0)


@pytest.mark.parametrize("matrices", [WeightsDtype.BFLOAT16, WeightsDtype.INT8])
def test_random_matrices_are_those_of_the_seed_rounded(matrices: WeightsDtype) -> None:
    config, shape = tiny_config("llama"), (8, 64)
    plain = RandomWeights(3, config, TensorFormat(CPU, torch.float32)).take_matrix("a.weight", shape)
    found = RandomWeights(3, config, TensorFormat(CPU, torch.float32, matrices)).take_matrix("a.weight", shape)
    expected = dense_of(plain).bfloat16() if matrices is WeightsDtype.BFLOAT16 else rounded(dense_of(plain))
    assert torch.equal(dense_of(found), expected)


@pytest.mark.parametrize(("matrices", "step", "inputs"), [(WeightsDtype.INT8, 32, 48), (WeightsDtype.FLOAT8, 16, 24)])
def test_a_matrix_whose_rows_have_no_whole_blocks_is_named(matrices: WeightsDtype, step: int, inputs: int) -> None:
    source = RandomWeights(3, tiny_config("llama"), TensorFormat(CPU, torch.float32, matrices))
    with pytest.raises(FieldOutOfRange, match=rf"multiple of {step} values; a\.weight has {inputs}") as caught:
        source.take_matrix("a.weight", (8, inputs))
    assert caught.value.param == "weights_dtype"


def test_rounded_matrices_make_another_model() -> None:
    def print_of(matrices: WeightsDtype) -> str:
        return fingerprint(ResolvedModel("tiny", tiny_config("llama"), None, 0, matrices))

    same = {print_of(WeightsDtype.CHECKPOINT), print_of(WeightsDtype.FLOAT32)}
    assert (len(same), len(same | set(map(print_of, WeightsDtype)))) == (1, 4)


# GGUF files.

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


def test_a_file_that_is_cut_short_or_gone_and_a_broken_index_are_refused(tmp_path: Path) -> None:
    source, file = source_of(write(tmp_path)), tmp_path / "m.gguf"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(BrokenModel, match=r"m\.gguf has changed: it has 5000 bytes, not \d+"):
        source.take("model.norm.weight", (64,))
    file.unlink()
    with pytest.raises(BrokenModel, match=r"cannot read .*m\.gguf: No such file"):
        source.take("model.layers.0.input_layernorm.weight", (64,))
    (tmp_path / "gguf.json").write_text('{"files": ["m.gguf"]}')
    with pytest.raises(BrokenModel, match=r"gguf\.json"):
        GgufFile(tmp_path, TensorFormat(CPU, torch.float32))


@pytest.mark.parametrize(("kind", "first"), [("Q8_0", 34), ("Q4_1", 2)])
def test_a_file_with_scales_that_are_not_finite_is_refused(tmp_path: Path, kind: str, first: int) -> None:
    model, name = write(tmp_path, kind=kind), "model.layers.1.mlp.up_proj.weight"
    assert model.folder is not None
    with (tmp_path / "m.gguf").open("r+b") as file:
        file.seek(GgufIndex.read(model.folder).tensors[name].offset + first)
        file.write(np.float16(np.inf).tobytes())
    with pytest.raises(BrokenModel, match=f"'{re.escape(name)}' in .* scales that are not finite as float16"):
        source_of(model).take_matrix(name, (96, 64))


def test_a_tensor_that_is_not_there_or_has_another_shape_is_named(tmp_path: Path) -> None:
    source = source_of(write(tmp_path))
    with pytest.raises(BrokenModel, match=r"no tensor 'lm_head\.weight'"):
        source.take("lm_head.weight", (64, 64))
    with pytest.raises(BrokenModel, match=r"'model\.norm\.weight' in .* is \(64,\), must be \(48,\)"):
        source.take("model.norm.weight", (48,))
    with pytest.raises(BrokenModel, match=r"no use for: model\.embed_tokens\.weight"):
        source.finish(re.compile(r"norm|proj"))


_SCALED = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_SCALED}
_YARN = {"rope_type": "yarn", **_SCALED}
_WINDOW = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _LLAMA3},
    "qwen2": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "qwen3": {"rope_parameters": _YARN},
    "phi3": {},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "gemma2": _WINDOW,
    "gemma3_text": {**_WINDOW, "num_hidden_layers": 7},
    "granite": {f"{name}_multiplier": 0.3 for name in ("attention", "embedding", "residual")} | {"logits_scaling": 2.0},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "gpt_oss": {**_EXPERTS, **_WINDOW, "num_local_experts": 4, "rope_parameters": {**_YARN, "truncate": False}},
}


@torch.no_grad()
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_model_from_files_of_any_architecture_agrees_with_what_was_written(tmp_path: Path, model_type: str) -> None:
    """In several files, and without a copy."""
    changed = {"tie_word_embeddings": model_type.startswith("gemma"), **ARCHITECTURES[model_type]}
    written, tokens = tiny_model(model_type, TOKENIZER.get_vocab_size(), **changed), torch.arange(3, 60)
    write_gguf(tmp_path / "m.gguf", written, TOKENIZER, tensors_per_file=9)
    first, *_, last = sorted(tmp_path.glob("m-*.gguf"))
    model = resolve(str(last), cache_dir=tmp_path / "cache")
    stack = load_stack(model, device=CPU, dtype=torch.float32, attention=ReferenceAttention())
    [found] = Drive(stack, [tokens]).run([{0: len(tokens)}])
    assert_agrees(found, expect(written, tokens))
    assert needed_bytes(Recipe.choose(model, Settings(model=str(last), dtype="float32").engine())) > 0
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    last.unlink()
    with pytest.raises(UnknownModel, match=f"{last.name} is not there"):
        resolve(str(first), cache_dir=tmp_path / "cache")
