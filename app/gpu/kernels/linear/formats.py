"""Weights as panels, in the types that they have: the formats, and how a matrix becomes one.

GGUF's quantized blocks are taken apart: each weight is `scale * quant + offset`. Quants are whole numbers. For these
kinds the product of scale and quant needs no rounding, so that a multiply-add has the bits of gguf's own `dequantize`,
which rounds the product before it adds the offset. The groups of other checkpoints keep their codes, see `encodings`.

Blocks are read many at a time, as `[..., bytes, PANEL]` uint8: each byte beside those at its place in the rows of a
panel, which are treated alike. A reader gives three tensors: scales and offsets, or None,
`[..., groups, PANEL]` float16 or float32, and quants `[..., inputs, PANEL]` int8. Quants of four bits are
`[..., inputs / 2, PANEL]` uint8, two neighbours in a byte, the first in its low half.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.kernels.cpu import lone_threads
from app.gpu.kernels.cpu.launch import ELEMENTS
from app.gpu.kernels.cpu.tiles import FLOAT4, FLOAT8, HALVES, PAIRS, PANEL, ROUNDED, TO_BFLOAT16, TO_FLOAT16
from app.gpu.kernels.linear.base import BlockMatrix, Matrix, dense_of
from app.gpu.kernels.linear.encodings import HEAD_BYTES, Codes, Grouped

_ROWS = 8 * PANEL
"""Rows of blocks that are taken apart at a time, so that what they become stays in the cache."""
_DENSE = (torch.float32, torch.bfloat16, torch.float16)
"""Types that kernels read."""
_SCALED = {torch.float32: "scales", torch.bfloat16: TO_BFLOAT16, torch.float16: TO_FLOAT16}
"""The name of a group's scales, by the type to which its weights are rounded."""
_SCALES: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.float16}
_CODES = {Codes.INT4: PAIRS, Codes.INT8: "quants", Codes.FLOAT4: FLOAT4 + PAIRS, Codes.FLOAT8: FLOAT8 + "quants"}
_Fields = tuple[Tensor, Tensor | None, Tensor]
"""Scales, offsets and quants."""


def to_panels(matrix: Matrix, *, in_bfloat16: bool = False) -> tuple[Tensor, Any]:
    """The panels of a matrix `[out, in]`, also on `meta`, and what stands for their type inside a kernel. Outputs that
    the last panel lacks are zeros. Dense panels are `[panels, inputs, PANEL]`; types that no kernel reads become
    float32. For products in bfloat16, whose inputs must be even, all but blocks is rounded to it: `[panels, inputs / 2,
    PANEL, 2]`. Blocks are `[panels, bytes]` uint8, see `_record`.
    """
    if isinstance(matrix, BlockMatrix) and (isinstance(matrix.kind, Grouped) or matrix.kind in _KINDS):
        record = _record(matrix.kind, in_bfloat16)
        return _pack_blocks(matrix, record), record
    dense = dense_of(matrix)
    if in_bfloat16:
        panels = _cut(dense.bfloat16())
        return panels.view(len(panels), -1, 2, PANEL).transpose(2, 3).contiguous(), HALVES
    dense = dense if dense.dtype in _DENSE else dense.float()
    return _cut(dense), ELEMENTS[dense.dtype]


def _record(kind: str | Grouped, in_bfloat16: bool) -> Any:
    """A panel of blocks is a run of these, one for each group of inputs:

        scales    [PANEL], float16, float32, or bfloat16 as uint16
        offsets   [PANEL], of the same type; some kinds have none
        zeros     [PANEL] int8; some groups have them
        quants    [group, PANEL] int8; or `pairs` [group / 2, PANEL], two inputs in a byte, the first in its low half

    For products in bfloat16, to which each weight is rounded as it is unpacked, the quants' name begins with `ROUNDED`.
    """
    if isinstance(kind, Grouped):
        fields: list[Any] = [(_SCALED[kind.values], _SCALES[kind.scales], PANEL)]
        fields += [("zeros", np.int8, PANEL)] if kind.has_zeros else []
        group, quants, name = kind.inputs, np.int8 if kind.codes.startswith("int") else np.uint8, _CODES[kind.codes]
    else:
        _, group, quants, bits, scales, has_offsets = _KINDS[kind]
        fields = [("scales", scales, PANEL), *([("offsets", scales, PANEL)] if has_offsets else [])]
        name = "quants" if bits == 8 else PAIRS
    lines = group // 2 if name.endswith(PAIRS) else group
    return np.dtype([*fields, (ROUNDED * in_bfloat16 + name, quants, (lines, PANEL))])


def _cut(rows: Tensor) -> Tensor:
    """Rows `[out, width]` as `[panels, width, PANEL]`."""
    outputs, width = rows.shape
    padded = F.pad(rows, (0, 0, 0, -outputs % PANEL)) if outputs % PANEL else rows
    return padded.view(-1, PANEL, width).transpose(1, 2).contiguous()


def _pack_blocks(matrix: BlockMatrix, record: Any) -> Tensor:
    """Records of groups, panel by panel: `[panels, bytes]` uint8."""
    (outputs, inputs), kind = matrix.shape, matrix.kind
    read: Callable[[Tensor], _Fields]
    if isinstance(kind, Grouped):
        group, block, read = kind.inputs, kind.inputs, partial(_group, kind)
    else:
        read, group, block = *_KINDS[kind][:2], 256 if kind.endswith(("_K", "_XS")) else 32
    groups = inputs // group
    panels = matrix.rows.new_empty(-(-outputs // PANEL), groups, record.itemsize)
    if panels.is_meta:
        return panels.view(len(panels), -1)
    inference = torch.is_inference_mode_enabled()

    def pack(first: int) -> None:
        target, end = panels[first // PANEL :][: _ROWS // PANEL], 0
        with torch.inference_mode(inference):  # each thread has a mode of its own
            blocks = _cut(matrix.rows[first : first + _ROWS]).unflatten(1, (inputs // block, -1))
            *factors, quants = read(blocks)
            for numbers in factors:
                if numbers is not None:
                    size = PANEL * numbers.itemsize
                    target[..., end : end + size] = numbers.flatten(1, 2).contiguous().view(torch.uint8)
                    end += size
            lines = quants.flatten(1, 2).view(torch.uint8)
            target[..., end:].unflatten(2, (-1, PANEL)).copy_(lines.view(*target.shape[:2], -1, PANEL))

    with lone_threads() as threads:
        for _ in threads.map(pack, range(0, outputs, _ROWS)):
            pass
    return panels.view(len(panels), -1)


def _halves(blocks: Tensor, first: int) -> Tensor:
    """The float16 at byte `first`, `[..., 1, PANEL]`."""
    return blocks[..., first : first + 2, :].transpose(-1, -2).contiguous().view(torch.float16).transpose(-1, -2)


def _group(kind: Grouped, blocks: Tensor) -> _Fields:
    """Scales, zeros in the place of offsets, and codes as they are."""
    scales = blocks[..., :4, :].transpose(-1, -2).contiguous().view(torch.float32).transpose(-1, -2)
    zeros = blocks[..., 4:5, :].view(torch.int8) if kind.has_zeros else None
    return scales.to(kind.scales), zeros, blocks[..., HEAD_BYTES:, :]


def _nibbles(packed: Tensor) -> Tensor:
    """`[..., n, PANEL]` bytes as `[..., 2 n, PANEL]` numbers: all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-2)


def _pairs(packed: Tensor) -> Tensor:
    """The same numbers, two neighbours in a byte: `[..., n, PANEL]`."""
    even, odd = packed[..., 0::2, :], packed[..., 1::2, :]
    low, high = odd << 4, even >> 4
    low |= even & 15
    high |= odd & 240
    return torch.cat((low, high), dim=-2)


def _shifts(blocks: Tensor, step: int) -> Tensor:
    """`[8 / step, 1, 1]`: how far the parts of a byte that have `step` bits are from its low end."""
    return torch.arange(0, 8, step, dtype=torch.uint8, device=blocks.device)[:, None, None]


def _fifth_bits(blocks: Tensor, first: int) -> Tensor:
    """The bits of the four bytes at `first`, `[..., 32, PANEL]`, each as 16."""
    bits = blocks[..., first : first + 4, None, :] >> _shifts(blocks, 1)[:, 0] & 1
    return bits.flatten(-3, -2) << 4


def _plain(bits: int, has_offsets: bool, blocks: Tensor) -> _Fields:
    """Blocks of 32 inputs with one scale: Q8_0, Q5_0 and Q4_0, whose quants are signed; Q5_1 and Q4_1 have offsets."""
    first = 4 if has_offsets else 2
    scales, offsets = _halves(blocks, 0), _halves(blocks, 2) if has_offsets else None
    if bits == 5:
        quants = _nibbles(blocks[..., first + 4 :, :]) | _fifth_bits(blocks, first)
        return scales, offsets, quants.view(torch.int8) - (0 if has_offsets else 16)
    quants = blocks[..., first:, :]
    if bits == 8:
        return scales, offsets, quants.view(torch.int8)
    return scales, offsets, _pairs(quants) ^ (0 if has_offsets else 0x88)  # 0x88: each minus 8


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets `[..., 8, PANEL]`, float32, of blocks that begin as those of Q4_K: factors have six bits."""
    low, high, rest = blocks[..., 4:16, :].unflatten(-2, (3, 4)).unbind(-3)
    scales = torch.cat((low & 63, (rest & 15) | (low >> 2 & 48)), dim=-2)
    offsets = torch.cat((high & 63, (rest >> 4) | (high >> 2 & 48)), dim=-2)
    return _halves(blocks, 0).float() * scales.float(), -(_halves(blocks, 2).float() * offsets.float())


def _q4_k(blocks: Tensor) -> _Fields:
    pairs = _pairs(blocks[..., 16:, :].unflatten(-2, (4, 32)))
    return *_k_scales(blocks), pairs.flatten(-3, -2)


def _q5_k(blocks: Tensor) -> _Fields:
    fifth = (blocks[..., None, 16:48, :] >> _shifts(blocks, 1) & 1) << 4
    low = _nibbles(blocks[..., 48:, :].unflatten(-2, (4, 32))).flatten(-3, -2).unflatten(-2, (8, 32))
    return *_k_scales(blocks), (low | fifth).flatten(-3, -2).view(torch.int8)


def _q6_k(blocks: Tensor) -> _Fields:
    low = _nibbles(blocks[..., :128, :].unflatten(-2, (2, 64)))
    high = (blocks[..., 128:192, :].unflatten(-2, (2, 1, 32)) >> _shifts(blocks, 2) & 3) << 4
    quants = (low.unflatten(-2, (4, 32)) | high).flatten(-4, -2)
    scales = _halves(blocks, 208).float() * blocks[..., 192:208, :].view(torch.int8).float()
    return scales, None, quants.view(torch.int8) - 32


def _in_twos(packed: Tensor) -> Tensor:
    """`[..., n, 32, PANEL]` bytes as the numbers of two bits in them, `[..., 128 n, PANEL]`."""
    return (packed[..., None, :, :] >> _shifts(packed, 2) & 3).flatten(-4, -2)


def _halved(numbers: Tensor) -> Tensor:
    """Numbers of four bits `[..., n, PANEL]`, two neighbours in a byte."""
    return numbers[..., 0::2, :] & 15 | numbers[..., 1::2, :] << 4


def _q2_k(blocks: Tensor) -> _Fields:
    factors, quants = blocks[..., :16, :], _in_twos(blocks[..., 16:80, :].unflatten(-2, (2, 32)))
    scales, offsets = (factors & 15).float(), (factors >> 4).float()
    return _halves(blocks, 80).float() * scales, -(_halves(blocks, 82).float() * offsets), _halved(quants)


def _q3_k(blocks: Tensor) -> _Fields:
    low = _in_twos(blocks[..., 32:96, :].unflatten(-2, (2, 32)))
    high = (blocks[..., None, :32, :] >> _shifts(blocks, 1) & 1).flatten(-3, -2)
    factors = _nibbles(blocks[..., 96:104, :])
    upper = (blocks[..., None, 104:108, :] >> _shifts(blocks, 2) & 3).flatten(-3, -2)
    scales = ((factors | upper << 4).view(torch.int8) - 32).float()
    return _halves(blocks, 108).float() * scales, None, _halved(low - ((high ^ 1) << 2))


def _looked_up(codes: Tensor) -> Tensor:
    return torch.tensor(_IQ4, dtype=torch.int8, device=codes.device)[codes.int()]


def _iq4_nl(blocks: Tensor) -> _Fields:
    return _halves(blocks, 0), None, _looked_up(_nibbles(blocks[..., 2:, :]))


def _iq4_xs(blocks: Tensor) -> _Fields:
    upper = (blocks[..., 2:4, None, :] >> _shifts(blocks, 2)[:, 0] & 3).flatten(-3, -2)
    lower = blocks[..., 4:8, :]
    factors = torch.stack((lower & 15, lower >> 4), dim=-2).flatten(-3, -2)
    scales = ((factors | upper << 4).view(torch.int8) - 32).float()
    codes = _nibbles(blocks[..., 8:, :].unflatten(-2, (8, 16))).flatten(-3, -2)
    return _halves(blocks, 0).float() * scales, None, _looked_up(codes)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for (ggml, `kvalues_iq4nl`)."""
_KINDS: dict[str, tuple[Callable[[Tensor], _Fields], int, Any, int, Any, bool]] = {
    "Q8_0": (partial(_plain, 8, False), 32, np.int8, 8, np.float16, False),
    "Q4_0": (partial(_plain, 4, False), 32, np.int8, 4, np.float16, False),
    "Q4_1": (partial(_plain, 4, True), 32, np.uint8, 4, np.float16, True),
    "Q5_0": (partial(_plain, 5, False), 32, np.int8, 8, np.float16, False),
    "Q5_1": (partial(_plain, 5, True), 32, np.int8, 8, np.float16, True),
    "Q4_K": (_q4_k, 32, np.uint8, 4, np.float32, True),
    "Q5_K": (_q5_k, 32, np.int8, 8, np.float32, True),
    "Q6_K": (_q6_k, 16, np.int8, 8, np.float32, False),
    "Q2_K": (_q2_k, 16, np.uint8, 4, np.float32, True),
    "Q3_K": (_q3_k, 16, np.int8, 4, np.float32, False),
    "IQ4_NL": (_iq4_nl, 32, np.int8, 8, np.float16, False),
    "IQ4_XS": (_iq4_xs, 32, np.int8, 8, np.float32, False),
}
"""By kind: how blocks are read, inputs of a group, the quants' type and bits, the scales' type, are there offsets."""
