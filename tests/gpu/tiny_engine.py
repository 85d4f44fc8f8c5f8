"""Engines over a tiny Llama, and what Transformers says of it: fixtures for test files to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.domain.values import KVBudget, KVPolicy
from app.gpu.attention.pool_rows import columns_of
from app.gpu.engine import Engine
from app.gpu.startup.loader import load_engine
from app.model_store.resolve import ResolvedModel, resolve
from app.model_store.shapes import shape_config
from app.settings import EngineSettings
from tests.gpu.driving import Driver
from tests.gpu.oracle import RoundingModel

BLOCK = 4
_KV_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.float8_e4m3fn}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    """A tiny Llama whose weights Transformers has made."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape_config("tiny-llama"), dtype=torch.float32).save_pretrained(folder)
    return resolve(str(folder), cache_dir=folder)


@pytest.fixture(scope="module")
def oracle(model: ResolvedModel, kv_dtype: str) -> Any:
    """Transformers' model, with a cache that rounds as the engines of the test file do."""
    assert model.folder is not None
    found = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
    return found if kv_dtype == "auto" else RoundingModel(found, _KV_DTYPES[kv_dtype])


def make_engine(
    model: ResolvedModel,
    blocks: int = 200,
    max_step_tokens: int = 16,
    host_blocks: int = 0,
    policy: KVPolicy = KVPolicy.NONE,
    kv_dir: Path | None = None,
    max_draft_tokens: int | None = None,
    weights_device: int | None = None,
    weights_dir: Path = Path(),
    matmul_precision: str = "auto",
    kv_dtype: str = "auto",
    tensor_parallel: int = 1,
) -> Engine:
    config = model.config
    dtype = _KV_DTYPES.get(kv_dtype, torch.float32)
    row_bytes = columns_of(config.head_dim, dtype) * dtype.itemsize
    per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * row_bytes
    settings = EngineSettings(
        device="cpu",
        tensor_parallel=tensor_parallel,
        dtype="float32",
        matmul_precision=matmul_precision,
        batch_invariant=False,
        cuda_graphs=None,
        weights_device=weights_device,
        weights_dir=weights_dir,
        chunk_bytes=1 << 20,
        kv_dtype=kv_dtype,
        kv_device=KVBudget(bytes=blocks * BLOCK * per_token),
        kv_host=KVBudget(bytes=host_blocks * BLOCK * per_token),
        kv_disk=KVBudget(bytes=1 << 24),
        kv_dir=kv_dir,
        kv_policy=policy,
        block_size=BLOCK,
        max_step_tokens=max_step_tokens,
        max_running=8,
        max_draft_tokens=max_draft_tokens,
        max_activation_bytes=1 << 30,
        prefill_transport="tcp",
        computes_prompts=False,
        max_model_len=None,
    )
    return load_engine(model, settings)


@pytest.fixture
def driver(model: ResolvedModel, kv_dtype: str) -> Driver:
    return Driver(make_engine(model, kv_dtype=kv_dtype))


def prompt(seed: int, length: int) -> list[int]:
    tokens: list[int] = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens
