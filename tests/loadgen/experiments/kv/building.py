"""KV and session files made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

BLOCKS, LAYERS, KV_HEADS, BLOCK_TOKENS, HEAD_DIM = 3, 2, 2, 16, 8
SHAPE = (BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)


def random_kv(dtype: Any = np.float32) -> Any:
    """Blocks of normally distributed numbers."""
    return np.random.default_rng(7).normal(size=SHAPE).astype(dtype)


def save_session(path: Path, kv: Any, computed_tokens: int) -> Path:
    """A file with a session's tensors, as the safetensors library writes it."""
    tensors = {
        "token_ids": np.arange(computed_tokens + 1, dtype=np.int32),
        "about": np.zeros(13, np.uint8),
        "kv": kv,
        "sha256": np.zeros(32, np.uint8),
    }
    save_file(tensors, path, {"computed_tokens": str(computed_tokens)})
    return path
