"""Matrices in quantized blocks of any kind, with scales that are ordinary or as extreme as they come."""

import gguf
import numpy as np
import torch

from app.gpu.kernels.linear.base import BlockMatrix

HALVES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
"""Where the float16 numbers of a block begin, by its kind."""
ORDINARY = np.array([0.01, -0.02, 0.003, 0.5], np.float16)
EXTREME = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, -1.0, 65504.0, -65504.0], np.float16)


def draw_blocks(kind: str, rows: int, blocks: int, scales: np.ndarray = ORDINARY) -> BlockMatrix:
    """`rows` rows of so many blocks: any bits for quants, any of `scales` for scales and offsets."""
    inputs, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    chance = np.random.default_rng(rows + blocks)
    packed = chance.integers(0, 256, (rows, blocks, nbytes), dtype=np.uint8)
    for first in HALVES[kind]:
        drawn = chance.choice(scales, (rows, blocks, 1))
        packed[:, :, first : first + 2] = drawn.view(np.uint8)
    return BlockMatrix(kind, torch.from_numpy(packed.reshape(rows, -1)), (rows, blocks * inputs))
