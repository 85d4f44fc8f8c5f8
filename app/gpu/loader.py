"""Putting an engine together: model, KV pool sized to the machine, scheduler, handlers."""

from __future__ import annotations

import psutil
import torch

from app.domain import ModelInfo
from app.errors import FieldOutOfRange
from app.gpu.attention import attention_for
from app.gpu.batch import make_batch
from app.gpu.commands import CommandHandler
from app.gpu.engine import Engine
from app.gpu.kv_blocks import BlockPool
from app.gpu.kv_cache import KVCache
from app.gpu.kv_pool import KVPool, block_bytes
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.openmp import release_threads
from app.gpu.runner import Runner
from app.gpu.scheduler import Scheduler
from app.gpu.turns import Turns
from app.model_store.resolve import ResolvedModel
from app.settings import EngineSettings

KV_SHARE = {"cpu": 0.25, "cuda": 0.9}
"""Default share of the memory that is free after the weights: a CPU's is also everyone else's."""


def load_engine(model: ResolvedModel, settings: EngineSettings) -> Engine:
    """Load the weights and allocate the KV pool. Takes seconds; raises DjinnError if the settings do not fit the
    model.
    """
    device = choose_device(settings.device)
    stack = load_stack(
        model,
        device=device,
        dtype=choose_dtype(settings.dtype, device),
        attention=attention_for(device),
        max_model_len=settings.max_model_len,
    )
    engine = build_engine(model.name, stack, settings)
    release_threads()  # the engine will run on a thread of its own
    return engine


def build_engine(name: str, stack: LayerStack, settings: EngineSettings) -> Engine:
    """An engine around a loaded model."""
    size = block_bytes(stack, settings.block_size)
    num_blocks = _kv_bytes(stack.device, settings.kv_bytes) // size
    if num_blocks < 1:
        raise FieldOutOfRange(f"kv_device must hold at least one block of {size} bytes", param="kv_device")
    limit = min(stack.max_model_len, num_blocks * settings.block_size)
    _warm_up(stack)
    cache = KVCache(BlockPool(num_blocks, settings.block_size))
    scheduler = Scheduler(
        cache,
        num_layers=stack.num_layers,
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
    )
    turns = Turns(scheduler, limit)
    return Engine(
        _describe(name, stack, limit, size // settings.block_size),
        scheduler,
        Runner(stack, KVPool(stack, num_blocks, settings.block_size)),
        turns,
        CommandHandler(scheduler, turns, text_bytes=stack.parameter_bytes, block_bytes=size),
    )


@torch.inference_mode()
def _warm_up(stack: LayerStack) -> None:
    """Run a decode row and a prompt through one layer, so that no client waits for kernels to be compiled."""
    batch = make_batch([(0, 1), (0, 32)], [[0], [1]], 32, stack.device)
    pool = torch.zeros(2, 2, stack.kv_heads, 32, stack.head_dim, dtype=stack.dtype, device=stack.device)
    hidden = stack.embed(torch.zeros_like(batch.positions), batch.positions)
    stack.head(stack.layer(0, hidden, batch, pool))


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a CUDA device. Raises FieldOutOfRange for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise FieldOutOfRange(f"device is {name!r}; use auto, cpu, cuda or cuda:N", param="device") from None
    known = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count())
    if not known:
        count = torch.cuda.device_count()
        raise FieldOutOfRange(f"device is {name!r}; this machine has cpu and {count} CUDA devices", param="device")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on CPU and bfloat16 on CUDA."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _kv_bytes(device: torch.device, asked: int | None) -> int:
    if asked is not None:
        return asked
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free * KV_SHARE[device.type])


def _describe(name: str, stack: LayerStack, max_model_len: int, kv_bytes_per_token: int) -> ModelInfo:
    return ModelInfo(
        name=name,
        max_model_len=max_model_len,
        vocab_size=stack.vocab_size,
        num_layers=stack.num_layers,
        hidden_size=stack.hidden_size,
        kv_heads=stack.kv_heads,
        head_dim=stack.head_dim,
        dtype=str(stack.dtype).removeprefix("torch."),
        device=str(stack.device),
        parameter_bytes=stack.parameter_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
    )
