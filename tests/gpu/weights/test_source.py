"""Weights from a folder: every tensor needed, none left, converted to the dtype asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from app.gpu.attention.reference import ReferenceAttention
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.weights.form import Form
from app.gpu.weights.random_weights import RandomWeights
from app.gpu.weights.safetensors_folder import SafetensorsFolder
from app.model_store.errors import BrokenModel
from app.model_store.resolve import ResolvedModel
from tests.gpu.models.driving import Drive, assert_agrees
from tests.gpu.models.oracle import build_model, expect, save_model, tiny_config

CPU = torch.device("cpu")
NOTHING = re.compile(r"(?!)")
MAPS = Path("/proc/self/maps")
TOKENS = torch.arange(3, 20)


def load(folder: Path, case: str = "llama") -> LayerStack:
    model = ResolvedModel(case, tiny_config(case), folder, seed=0)
    return load_stack(model, device=CPU, dtype=torch.float32, attention=ReferenceAttention())


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Apply `change` to the tensors of a single-file folder."""
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


def test_a_missing_tensor_is_named(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.2.self_attn.k_proj.weight"))
    with pytest.raises(BrokenModel, match=r"no tensor 'model\.layers\.2\.self_attn\.k_proj\.weight'"):
        load(tmp_path)


def test_a_tensor_the_model_has_no_use_for_is_named(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}))
    with pytest.raises(BrokenModel, match=r"no use for: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(BrokenModel, match=r"'model\.norm\.weight'.* is \(7,\), must be \(48,\)"):
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


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsFolder(tmp_path, Form(CPU, torch.float32))


def test_a_truncated_file_is_refused(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BrokenModel, match="cannot read"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_model(build_model(tiny_config("llama")), tmp_path, max_shard_size="80KB")
    (folder / sorted(path.name for path in folder.glob("*.safetensors"))[1]).unlink()
    with pytest.raises(BrokenModel, match=r"model-00002-of-.*\.safetensors"):
        load(folder)


@pytest.mark.parametrize("index", ["", "{}", '{"weight_map": {"model.norm.weight": "elsewhere.safetensors"}}'])
def test_a_broken_index_is_refused(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BrokenModel):
        SafetensorsFolder(tmp_path, Form(CPU, torch.float32)).take("model.norm.weight", (48,))


def test_random_weights_have_unit_norms_and_small_biases() -> None:
    source = RandomWeights(0, tiny_config("llama"), Form(CPU, torch.float32))
    assert torch.equal(source.take("model.norm.weight", (48,)), torch.ones(48))
    for name, shape in (("q_proj.bias", (5000,)), ("q_proj.weight", (100, 50))):
        tensor = source.take(name, shape)
        assert float(tensor.mean()) == pytest.approx(0.0, abs=0.002)
        assert float(tensor.std()) == pytest.approx(0.02, rel=0.05)
    source.finish(NOTHING)


def test_random_weights_depend_on_seed_and_name_but_not_on_order() -> None:
    one, other = (RandomWeights(3, tiny_config("llama"), Form(CPU, torch.bfloat16)) for _ in range(2))
    first = one.take("a.weight", (4, 4))
    second = one.take("b.weight", (4, 4))
    assert torch.equal(other.take("b.weight", (4, 4)), second)
    assert torch.equal(other.take("a.weight", (4, 4)), first)
    assert not torch.equal(first, second)
    assert not torch.equal(
        RandomWeights(4, tiny_config("llama"), Form(CPU, torch.bfloat16)).take("a.weight", (4, 4)), first
    )
