"""Matrices in quantized blocks of any kind, with scales that are ordinary or as extreme as they come."""

from dataclasses import replace
from math import gcd

import gguf
import numpy as np
import torch

from app.gpu.kernels.linear.base import BlockMatrix
from app.gpu.kernels.linear.encodings import Codes, Grouped, pack_groups

HALVES = {kind: [0] for kind in ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS")}
HALVES |= {kind: [0, 2] for kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")}
HALVES |= {"Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108]}
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


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
GROUPED = {
    "int4 in float16": Grouped(Codes.INT4, 128, F16, F16, has_zeros=True),
    "int4 in bfloat16": Grouped(Codes.INT4, 32, BF16, BF16),
    "int8": Grouped(Codes.INT8, 64, F32, F32, has_zeros=True),
    "NVFP4": Grouped(Codes.FLOAT4, 16, BF16, F32),
    "float8": Grouped(Codes.FLOAT8, 512, BF16, BF16),
}
"""As checkpoints have them."""


def draw_groups(name: str, rows: int, inputs: int) -> BlockMatrix:
    """`rows` rows of `inputs`, or up to 15 more: any codes but NaN, scales of either sign, zeros within the codes."""
    inputs += -inputs % 16
    kind = replace(GROUPED[name], inputs=gcd(GROUPED[name].inputs, inputs))
    chance, count = torch.Generator().manual_seed(rows + inputs), inputs // kind.inputs
    codes = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8, generator=chance)
    codes[codes == 127] = 1
    codes[codes == -1] = 2
    if kind.codes.in_pairs:
        codes &= 15
    most = 8 if kind.codes.in_pairs else 128
    scales = (torch.randn(rows, count, generator=chance) / most).to(kind.scales)
    zeros = torch.randint(-most, most, (rows, count), generator=chance) if kind.has_zeros else None
    return BlockMatrix(kind, pack_groups(kind, codes.view(torch.uint8), scales, zeros), (rows, inputs))
