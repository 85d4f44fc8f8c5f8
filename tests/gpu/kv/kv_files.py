"""KV files with content that is made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from app.gpu.kv.header import KVFileHeader, KVIdentity, KVLayout

LAYOUT = KVLayout(layers=2, kv_heads=1, block_size=4, head_dim=2, dtype="float32")
IDENTITY = KVIdentity("model-a", vocab_size=100, layout=LAYOUT)
ABOUT = '{"a": "é"}'.encode()
HEADER = KVFileHeader(IDENTITY, (5, 99, 0, 7, 8, 9), computed_tokens=5, namespace=b"\x01\xff", about_bytes=len(ABOUT))
DIGEST = 32
"""Bytes of the checksum that ends a file."""


def blocks_of(header: KVFileHeader, seed: int = 0) -> list[memoryview]:
    """Random blocks, zero after the last computed token."""
    layout = header.identity.layout
    element_bytes = {"float32": 4, "float8": 1}.get(layout.dtype, 2)
    shape = (header.blocks, *layout.block_shape[:-1], layout.block_shape[-1] * element_bytes)
    content = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    if rest := header.computed_tokens % layout.block_size:
        content[-1, :, :, :, rest:] = 0
    return [memoryview(block.tobytes()) for block in content]


def buffers_for(header: KVFileHeader, count: int | None = None) -> list[memoryview]:
    count = header.blocks if count is None else count
    return [memoryview(bytearray(header.identity.layout.block_bytes)) for _ in range(count)]


def same(one: KVFileHeader, other: KVFileHeader) -> bool:
    return replace(one, token_ids=tuple(one.token_ids)) == replace(other, token_ids=tuple(other.token_ids))


def damage(path: Path, position: int, bits: int = 0xFF) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= bits
    path.write_bytes(content)
