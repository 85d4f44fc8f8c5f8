"""Tiny models, each of them loaded for the engine and by Transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from app.domain.values import KVBudget, KVPolicy
from app.gpu.device.streams import DeviceStreams, streams_of
from app.gpu.engine import Engine
from app.gpu.forward.graphs import CudaRecorder
from app.gpu.kernels.attention import attention_for
from app.gpu.kernels.attention.base import Attention
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.startup.loader import build_engine, load_engine
from app.gpu.startup.weights import LoadedModel
from app.gpu.weights.bundles import StreamedWeights
from app.model_store.resolve import ResolvedModel, resolve
from tests.gpu.driving import BLOCK as BLOCK
from tests.gpu.driving import cpu_settings
from tests.gpu.models.oracle import CASES, build_model, save_model
from tests.gpu.models.oracle import VOCAB as VOCAB
from tests.hugging_face import shape_config

STEP_TOKENS = 32
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {**CASES["gpt2"], "n_layer": 12},
    "gpt2-three-layers": CASES["gpt2"],
    "gpt2-relu": CASES["gpt2-relu"],
    "mistral": {**CASES["mistral-window"], "sliding_window": None, "num_hidden_layers": 32},
    "llama": {**CASES["llama"], "num_hidden_layers": 4},
    "two-layers": {**CASES["llama"], "num_hidden_layers": 2},
    "two-layers-window": {**CASES["mistral-window"], "num_hidden_layers": 2, "sliding_window": 6},
    "two-layers-mixed": {
        **CASES["qwen2-window"],
        "num_hidden_layers": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "two-layers-hybrid": {
        **CASES["qwen3_next"],
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "two-layers-both": {**CASES["falcon_h1, both in a layer"], "num_hidden_layers": 2},
    "llama-2-7b-scaled": {
        **shape_config("llama-2-7b").to_dict(),
        "hidden_size": 4096 // 32,
        "intermediate_size": 11_008 // 32,
        "num_attention_heads": 32 // 8,
        "num_key_value_heads": 32 // 8,
        "head_dim": 128 // 4,
        "vocab_size": 32_000 // 32,
    },
}


@dataclass(frozen=True)
class TinyModel:
    """One set of weights: as a folder for the engine, and in Transformers."""

    resolved: ResolvedModel
    stack: LayerStack
    oracle: Any
    streams: DeviceStreams | None = None
    """None: those of its device."""
    streamed: StreamedWeights | None = None
    """What moves the weights of `stack`, for one engine at a time; None: they stay."""
    kv_dtype: str = "auto"
    ranks: int = 1
    """More: an engine loads the model anew, with other processes for its other parts."""

    @property
    def num_layers(self) -> int:
        return self.stack.num_layers

    @property
    def hidden_size(self) -> int:
        return self.stack.hidden_size

    def engine(
        self,
        *,
        blocks: int = 400,
        max_step_tokens: int = STEP_TOKENS,
        host_blocks: int = 0,
        policy: KVPolicy = KVPolicy.NONE,
        recorder: CudaRecorder | None = None,
        max_draft_tokens: int | None = None,
        **changed: Any,
    ) -> Engine:
        """An engine of its own; `changed` are other settings. Prompts may have all of a step: a test knows then which
        rows run together. One whose streams are no CPU's drafts nothing, as a GPU drafts nothing unless it is asked to.
        """
        if max_draft_tokens is None and self.streams is not None:
            max_draft_tokens = 0
        settings = cpu_settings(
            tensor_parallel=self.ranks,
            kv_dtype=self.kv_dtype,
            kv_device=KVBudget(sessions=1, tokens=blocks * BLOCK),
            kv_host=KVBudget(sessions=1, tokens=host_blocks * BLOCK),
            kv_disk=KVBudget(sessions=1, tokens=400 * BLOCK),
            kv_policy=policy,
            max_step_tokens=max_step_tokens,
            max_running=16,
            max_draft_tokens=max_draft_tokens,
            **changed,
        )
        if self.ranks > 1:
            engine = load_engine(self.resolved, settings)
        else:
            loaded = LoadedModel(self.stack, self.streams or streams_of(self.stack.device), self.streamed)
            engine = build_engine(self.resolved, loaded, settings, recorder)
        engine._scheduler.fairness.prompt_tokens = 2 * max_step_tokens  # a capture has half of it
        return engine


def make_tiny(shape: str | dict[str, Any], folder: Path, attention: Attention | None = None) -> TinyModel:
    """The model of one of `SHAPES`, or another, written to `folder`, on a CPU, with its usual attention or another."""
    config = AutoConfig.for_model(**(SHAPES[shape] if isinstance(shape, str) else shape))
    with torch.no_grad():
        oracle = build_model(config)
    save_model(oracle, folder)
    resolved, cpu = resolve(str(folder), cache_dir=folder), torch.device("cpu")
    stack = load_stack(resolved, device=cpu, dtype=torch.float32, attention=attention or attention_for(cpu))
    return TinyModel(resolved, stack, oracle)


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return tokens


def vector(seed: int, size: int) -> torch.Tensor:
    """A random float32 vector of about the length that a residual stream of these models has."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))
