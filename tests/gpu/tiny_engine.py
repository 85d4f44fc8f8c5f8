"""Engines over a tiny Llama: fixtures for test files to import. What Transformers itself generates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from app.domain.values import KVBudget, KVPolicy
from app.gpu.engine import Engine
from app.gpu.kernels.attention.base import columns_of
from app.gpu.startup.loader import load_engine
from app.model_store import shapes
from app.model_store.resolve import ResolvedModel, resolve
from tests.gpu.driving import BLOCK as BLOCK
from tests.gpu.driving import Driver, cpu_settings
from tests.hugging_face import shape_config

FULL, SLIDING = "full_attention", "sliding_attention"
_KV_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.float8_e4m3fn}


def make_windowed(folder: Path, family: str, layer_types: list[str], window: int) -> ResolvedModel:
    """A tiny model with layers of these types, `SLIDING` ones with a window."""
    fields = {**shapes.shape_config("tiny-mistral").to_dict(), "model_type": family, "sliding_window": window}
    layers = {"layer_types": layer_types, "num_hidden_layers": len(layer_types), "max_window_layers": len(layer_types)}
    config = AutoConfig.for_model(**{**fields, **layers, "use_sliding_window": True, "max_position_embeddings": 16384})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return resolve(str(folder), cache_dir=folder)


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
    *,
    kv_dtype: str = "auto",
    **changed: Any,
) -> Engine:
    """An engine of a model that has few layers, with blocks of `BLOCK` tokens; `changed` are other settings."""
    config = model.config
    dtype = _KV_DTYPES.get(kv_dtype, torch.float32)
    row_bytes = columns_of(config.head_dim, dtype) * dtype.itemsize
    block_bytes = BLOCK * config.num_hidden_layers * 2 * config.num_key_value_heads * row_bytes
    budgets = {"kv_device": KVBudget(bytes=blocks * block_bytes), "kv_host": KVBudget(bytes=host_blocks * block_bytes)}
    settings = cpu_settings(
        **budgets, kv_dtype=kv_dtype, kv_dir=kv_dir, kv_policy=policy, max_step_tokens=max_step_tokens, **changed
    )
    return load_engine(model, settings)


@pytest.fixture
def driver(model: ResolvedModel, kv_dtype: str) -> Driver:
    return Driver(make_engine(model, kv_dtype=kv_dtype))


def prompt(seed: int, length: int) -> list[int]:
    tokens: list[int] = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def rounded(states: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., head_dim]` as KV of `dtype` gives them back: float8 with the least power of two for each head of each
    token that brings it within 448, the largest float8.
    """
    if dtype is not torch.float8_e4m3fn:
        return states.to(dtype).to(states.dtype)
    scales = (states.double().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30).log2().ceil().exp2()
    return ((states.double() / scales).to(dtype).double() * scales).to(states.dtype)


class RoundingCache(DynamicCache):
    """Keys and values as a cache of `dtype` gives them back, from the moment that they are stored."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key, value = (rounded(states, self._dtype) for states in (key_states, value_states))
        return super().update(key, value, *args, **kwargs)


@dataclass(frozen=True)
class RoundingModel:
    """A Transformers model whose caches round."""

    model: Any
    dtype: torch.dtype

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.generate(*args, past_key_values=RoundingCache(self.dtype), **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, past_key_values=RoundingCache(self.dtype), **kwargs)


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that a Transformers model puts after `prompt`, end tokens included like any other."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # it would take tokens equal to the pad token for padding
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def greedy_after(model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """The most likely token after `prompt` and after each beginning of `tokens`, all in one pass.

    They equal `tokens` if, and only if, the model itself generates `tokens` after `prompt`.
    """
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    return chosen
