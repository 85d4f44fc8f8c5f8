"""What the engine reads of the settings."""

from dataclasses import dataclass
from pathlib import Path

from app.domain.values import KVBudget, KVPolicy

DRAFT_TOKENS = 7
"""Most drafted tokens of one row: it has eight then, which attention on a CPU still takes one by one."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The part of the settings that the engine reads. Sizes in bytes and tokens."""

    device: str
    tensor_parallel: int
    """Processes that the model's layers are cut over, each on a device of its own."""
    dtype: str
    matmul_precision: str
    """`auto`, `float32` or `bfloat16`."""
    batch_invariant: bool
    cuda_graphs: bool | None
    """None: where the device is a GPU."""
    weights_device: int | None
    """None: all of them if they fit."""
    weights_dir: Path
    """Where a CPU's host copy of weights that are streamed is kept."""
    chunk_bytes: int
    """Of one copy to the device."""
    kv_dtype: str
    """`auto`, `float32`, `bfloat16` or `float16`."""
    kv_device: KVBudget | None
    """None, here and for the next two: from what is free."""
    kv_host: KVBudget | None
    kv_disk: KVBudget | None
    kv_dir: Path | None
    """Where KV files are kept; None: there is no disk tier."""
    kv_policy: KVPolicy
    block_size: int
    max_step_tokens: int
    max_running: int
    max_draft_tokens: int | None
    """None: `DRAFT_TOKENS` where drafts change no token, and help."""
    max_activation_bytes: int
    """Of checkpoints and captures in host memory."""
    max_model_len: int | None
