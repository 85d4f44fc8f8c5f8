"""What a model's parts take, known before a weight is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app.domain.errors import FieldOutOfRange
from app.gpu.attention.reference import ReferenceAttention
from app.gpu.linear.dense import DenseLinear
from app.gpu.weight_ring.survey import Survey, survey
from app.model_store.resolve import ResolvedModel
from tests.gpu.models.oracle import tiny_config

LLAMA_3_70B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
GPT2_XL: dict[str, Any] = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}


def surveyed(fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Survey:
    return survey(
        ResolvedModel("large", AutoConfig.for_model(**fields), None, 0), dtype, DenseLinear, ReferenceAttention(), None
    )


@pytest.mark.parametrize("fields", [LLAMA_3_70B, SMOLLM2_135M, GPT2_XL], ids=["llama-3-70b", "smollm2", "gpt2-xl"])
def test_all_parameters_are_there(fields: dict[str, Any]) -> None:
    found = surveyed(fields)
    with torch.device("meta"):
        oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    parameters = sum(parameter.numel() for parameter in oracle.parameters())
    if oracle.config.tie_word_embeddings:  # a table, and part of every pass
        parameters += oracle.lm_head.weight.numel()
    in_bundles = sum(piece.nbytes for layout in found.layouts for piece in layout.pieces)
    in_tables = sum(table.nbytes for table in found.tables)
    assert in_bundles + in_tables == parameters * 2


@pytest.mark.parametrize("fields", [LLAMA_3_70B, SMOLLM2_135M, GPT2_XL], ids=["llama-3-70b", "smollm2", "gpt2-xl"])
def test_no_part_is_larger_than_a_layer(fields: dict[str, Any]) -> None:
    sizes = [layout.nbytes for layout in surveyed(fields).layouts]
    assert max(sizes) == sizes[0]
    assert len(sizes) > AutoConfig.for_model(**fields).num_hidden_layers + 2  # the output projection is in parts


def test_parts_of_an_output_projection_that_is_far_larger_than_a_layer_do_not_become_tiny() -> None:
    slim = {**SMOLLM2_135M, "hidden_size": 36, "intermediate_size": 4, "vocab_size": 10_000}
    parts = surveyed(slim).layouts[31:]
    rows = [layout.pieces[0].shape[0] for layout in parts]
    assert rows[0] == 64 * (rows[0] // 64) >= 64
    assert sum(rows) == 10_000


@pytest.mark.parametrize("case", ["gpt_neox", "gemma", "mixtral"])
def test_a_model_that_runs_on_transformers_modules_is_refused(case: str) -> None:
    with pytest.raises(FieldOutOfRange, match=f"'{case}' runs on Transformers' modules") as refused:
        survey(ResolvedModel(case, tiny_config(case), None, 0), torch.float32, DenseLinear, ReferenceAttention(), None)
    assert refused.value.param == "weights_device"
    assert "llama, mistral, qwen2" in refused.value.message


def test_a_length_the_model_was_not_made_for_is_refused() -> None:
    with pytest.raises(FieldOutOfRange, match="between 2 and 128") as refused:
        survey(
            ResolvedModel("tiny", tiny_config("llama"), None, 0), torch.float32, DenseLinear, ReferenceAttention(), 129
        )
    assert refused.value.param == "max_model_len"
