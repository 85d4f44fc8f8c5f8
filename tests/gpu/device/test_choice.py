"""As what KV may be kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from app.domain.errors import FieldOutOfRange
from app.gpu.device.choice import choose_kv_dtype
from app.gpu.startup.loader import load_engine
from app.model_store.resolve import resolve
from app.settings import Settings
from tests.gpu.models.oracle import CASES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("computes", DTYPES)
def test_kv_is_kept_as_the_model_computes_unless_it_is_told_otherwise(computes: str) -> None:
    assert choose_kv_dtype("auto", DTYPES[computes]) is choose_kv_dtype(computes, DTYPES[computes]) is DTYPES[computes]


@pytest.mark.parametrize("name", DTYPES)
def test_float32_may_be_kept_as_any_type(name: str) -> None:
    assert choose_kv_dtype(name, torch.float32) is DTYPES[name]


@pytest.mark.parametrize("computes", DTYPES)
def test_float8_is_smaller_than_any_type_in_which_models_compute(computes: str) -> None:
    assert choose_kv_dtype("float8", DTYPES[computes]) is torch.float8_e4m3fn


def test_float8_needs_heads_whose_scales_lie_on_whole_words() -> None:
    config = AutoConfig.for_model(**{**CASES["llama"], "head_dim": 6})
    model = replace(resolve("random:tiny-llama", cache_dir=Path()), config=config)
    with pytest.raises(FieldOutOfRange, match="multiple of 4 numbers; this model's have 6") as refused:
        load_engine(model, Settings(device="cpu", kv_dtype="float8", state_dir=None).engine())
    assert refused.value.param == "kv_dtype"


@pytest.mark.parametrize(
    ("name", "computes"),
    [("float32", "bfloat16"), ("float32", "float16"), ("float16", "bfloat16"), ("bfloat16", "float16")],
)
def test_a_type_that_is_no_smaller_is_refused(name: str, computes: str) -> None:
    with pytest.raises(FieldOutOfRange, match=f"auto, {computes}, or smaller .* got {name}") as refused:
        choose_kv_dtype(name, DTYPES[computes])
    assert refused.value.param == "kv_dtype"


def test_it_is_refused_before_weights_are_read() -> None:
    model = replace(resolve("random:tiny-llama", cache_dir=Path()), folder=Path("/no/such/folder"))
    with pytest.raises(FieldOutOfRange, match="kv_dtype"):
        load_engine(model, Settings(device="cpu", dtype="bfloat16", kv_dtype="float16", state_dir=None).engine())
