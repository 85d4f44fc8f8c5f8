"""Which models load, how long their sequences may be, and what is said of those that cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from app.domain.errors import FieldOutOfRange
from app.gpu.attention.reference import ReferenceAttention
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.weights.form import Form
from app.gpu.weights.random_weights import RandomWeights
from app.model_store.errors import BrokenModel
from app.model_store.resolve import ResolvedModel
from tests.gpu.models.driving import Drive, assert_agrees
from tests.gpu.models.oracle import CASES, build_model, expect, save_model, tiny_config

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 23)


def load(config: Any, folder: Path | None = None, seed: int = 0, max_model_len: int | None = None) -> LayerStack:
    return load_stack(
        ResolvedModel("tiny", config, folder, seed),
        device=CPU,
        dtype=torch.float32,
        attention=ReferenceAttention(),
        max_model_len=max_model_len,
    )


@pytest.mark.parametrize("case", ["llama-tied-biased-wide-heads", "qwen3", "gpt2", "gpt_neox"])
def test_random_weights_are_those_that_the_source_gives_transformers(case: str) -> None:
    config = tiny_config(case)
    config.initializer_range = 0.2
    oracle = build_model(config)
    source = RandomWeights(7, config, Form(CPU, torch.float32))
    for name, parameter in oracle.named_parameters():
        parameter.copy_(source.take(name, tuple(parameter.shape)))
    stack = load(config, seed=7)
    [found] = Drive(stack, [TOKENS]).run([{0: len(TOKENS)}])
    assert_agrees(found, expect(oracle, TOKENS))
    assert stack.parameter_bytes == source.nbytes


@pytest.mark.parametrize("case", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("length", [0, 1, 129])
def test_a_length_the_model_was_not_made_for_is_refused(case: str, length: int) -> None:
    with pytest.raises(FieldOutOfRange, match="between 2 and 128") as caught:
        load(tiny_config(case), max_model_len=length)
    assert caught.value.param == "max_model_len"


_UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "sinks": ({"model_type": "gpt_oss", "layer_types": ["full_attention"] * 3, "num_local_experts": 4}, "s_aux"),
    "state-space": ({"model_type": "mamba"}, "mamba"),
    "encoder-decoder": ({"model_type": "t5"}, "t5"),
    "linear-attention": ({"model_type": "qwen3_next", "num_experts": 4}, "linear_attention"),
    "latent-attention": (
        {"model_type": "deepseek_v3", "num_key_value_heads": 4, "first_k_dense_replace": 3},
        "keys and values of several shapes",
    ),
    "own-attention": ({"model_type": "bloom", "n_layer": 3, "n_head": 4}, "bloom"),
    "differential-attention": ({"model_type": "diffllama"}, "its logits are off by"),
    "kwargs-dropped": ({"model_type": "stablelm", "hidden_size": 64}, "keyword arguments"),
    "window-in-the-mask": ({"model_type": "phimoe", "sliding_window": 8, "num_local_experts": 4}, "sliding window"),
}


@pytest.mark.parametrize("what", _UNSUPPORTED)
def test_an_architecture_that_cannot_run_is_refused_with_the_reason_and_the_known(what: str) -> None:
    fields, reason = _UNSUPPORTED[what]
    with pytest.raises(FieldOutOfRange, match=reason) as caught:
        load(AutoConfig.for_model(**{**CASES["llama"], **fields}))
    assert caught.value.param == "model"
    assert "llama, mistral, qwen2" in caught.value.message


@pytest.mark.parametrize(("model_type", "rope_type"), [("llama", "longrope"), ("olmo2", "dynamic")])
def test_rope_that_depends_on_the_sequence_length_is_refused(model_type: str, rope_type: str) -> None:
    factors = {"factor": 2.0, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    rope = {"rope_type": rope_type, "rope_theta": 100.0, "original_max_position_embeddings": 64, **factors}
    with pytest.raises(FieldOutOfRange, match=rope_type):
        load(AutoConfig.for_model(**{**CASES["llama"], "model_type": model_type, "rope_parameters": rope}))


def test_transformers_modules_need_all_their_weights_and_no_others(tmp_path: Path) -> None:
    oracle = build_model(tiny_config("gpt_neox"))
    state = oracle.state_dict()
    lost = state.pop("gpt_neox.layers.1.mlp.dense_h_to_4h.weight")
    with pytest.raises(BrokenModel, match=r"layers\.1\.mlp\.dense_h_to_4h"):
        load(oracle.config, save_model(oracle, tmp_path / "missing", state_dict=state))
    state |= {"gpt_neox.layers.1.mlp.dense_h_to_4h.weight": lost, "gpt_neox.extra": torch.ones(3)}
    with pytest.raises(BrokenModel, match=r"gpt_neox\.extra"):
        load(oracle.config, save_model(oracle, tmp_path / "left", state_dict=state))
