"""Weights as panels, in the types that they have: the formats, and how a matrix becomes one.

GGUF's quantized blocks are taken apart: each weight is `scale * quant + offset`. Quants are whole numbers. For these
kinds the product of scale and quant needs no rounding, so that a multiply-add has the bits of gguf's own `dequantize`,
which rounds the product before it adds the offset.

Blocks are read many at a time, as `[..., bytes, PANEL]` uint8: each byte beside those at its place in the rows of a
panel. Bytes that lie together are then treated alike.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.kernels.cpu import lone_threads
from app.gpu.kernels.cpu.launch import ELEMENTS
from app.gpu.kernels.cpu.tiles import HALVES, PAIRS, PANEL, ROUNDED
from app.gpu.kernels.linear.matrix import BlockMatrix, Matrix, dense_of

_ROWS = 8 * PANEL
"""Rows of blocks that are taken apart at a time, so that what they become stays in the cache."""


class PanelFormat(NamedTuple):
    """A type of weights. `element` stands for it inside a kernel; the weights of `group` inputs take `group_bytes`.

    `inputs` is the type of what is multiplied with them.
    """

    element: Any
    group: int
    group_bytes: int
    inputs: torch.dtype = torch.float32


DENSE = {
    dtype: PanelFormat(ELEMENTS[dtype], 1, PANEL * dtype.itemsize)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
"""Of dense panels `[panels, inputs, PANEL]`."""
PAIRED = PanelFormat(HALVES, 2, HALVES.itemsize, torch.bfloat16)
"""Of panels `[panels, inputs / 2, PANEL, 2]` bfloat16."""
_RECORDS: dict[str, tuple[int, Any, int, Any, bool]] = {
    "Q8_0": (32, np.int8, 8, np.float16, False),
    "Q4_0": (32, np.int8, 4, np.float16, False),
    "Q4_1": (32, np.uint8, 4, np.float16, True),
    "Q5_0": (32, np.int8, 8, np.float16, False),
    "Q5_1": (32, np.int8, 8, np.float16, True),
    "Q4_K": (32, np.uint8, 4, np.float32, True),
    "Q5_K": (32, np.int8, 8, np.float32, True),
    "Q6_K": (16, np.int8, 8, np.float32, False),
}
"""By the name of the kind: inputs of a group, the quants' type and bits, the scales' type, whether there are offsets.
"""


def blocks_of(kind: str, *, in_bfloat16: bool = False) -> PanelFormat:
    """The format of panels of blocks `[panels, bytes]` uint8. A panel is a run of records, one for each group of
    inputs:

        scales    [PANEL], float16 or float32
        offsets   [PANEL], of the same type; some kinds have none
        quants    [group, PANEL] int8; or `pairs` [group / 2, PANEL], two inputs in a byte, the first in its low half

    For products in bfloat16, to which each weight is rounded as it is unpacked, the quants' name begins with `ROUNDED`.
    """
    group, quants, bits, scales, has_offsets = _RECORDS[kind]
    fields: list[Any] = [("scales", scales, PANEL), *([("offsets", scales, PANEL)] if has_offsets else [])]
    name, lines = ("quants", group) if bits == 8 else (PAIRS, group // 2)
    record = np.dtype([*fields, (ROUNDED * in_bfloat16 + name, quants, (lines, PANEL))])
    return PanelFormat(record, group, record.itemsize, torch.bfloat16 if in_bfloat16 else torch.float32)


def to_panels(matrix: Matrix, *, in_bfloat16: bool = False) -> tuple[Tensor, PanelFormat]:
    """The panels of a matrix `[out, in]`, and their type; also on `meta`. Outputs that the last panel lacks are zeros.

    Types that no kernel reads become float32. For products in bfloat16 blocks stay as they are, and all else is rounded
    to it; inputs must be even.
    """
    if isinstance(matrix, BlockMatrix) and matrix.kind in _RECORDS:
        format = blocks_of(matrix.kind, in_bfloat16=in_bfloat16)
        return _pack_blocks(matrix, format), format
    dense = dense_of(matrix)
    if in_bfloat16:
        panels = _cut(dense.bfloat16())
        return panels.view(len(panels), -1, 2, PANEL).transpose(2, 3).contiguous(), PAIRED
    dense = dense if dense.dtype in DENSE else dense.float()
    return _cut(dense), DENSE[dense.dtype]


def _cut(rows: Tensor) -> Tensor:
    """Rows `[out, width]` as `[panels, width, PANEL]`."""
    outputs, width = rows.shape
    padded = F.pad(rows, (0, 0, 0, -outputs % PANEL)) if outputs % PANEL else rows
    return padded.view(-1, PANEL, width).transpose(1, 2).contiguous()


def _pack_blocks(matrix: BlockMatrix, format: PanelFormat) -> Tensor:
    """Records of groups, panel by panel: `[panels, bytes]` uint8."""
    outputs, inputs = matrix.shape
    panels = matrix.rows.new_empty(-(-outputs // PANEL), inputs // format.group, format.group_bytes)
    inference = torch.is_inference_mode_enabled()

    def pack(first: int) -> None:
        start = first // PANEL
        with torch.inference_mode(inference):  # each thread has a mode of its own
            _pack(matrix.kind, matrix.rows[first : first + _ROWS], panels[start : start + _ROWS // PANEL])

    with lone_threads() as threads:
        for _ in threads.map(pack, range(0, outputs, _ROWS)):
            pass
    return panels.view(len(panels), -1)


def _pack(kind: str, rows: Tensor, panels: Tensor) -> None:
    """Fill `panels` `[n, groups, group_bytes]` with rows of blocks."""
    block_bytes, read = _KINDS[kind]
    fields, end = read(_cut(rows).unflatten(1, (-1, block_bytes))), 0
    for numbers in (fields.scales, fields.offsets):
        if numbers is not None:
            size = PANEL * numbers.itemsize
            panels[..., end : end + size] = numbers.flatten(1, 2).contiguous().view(torch.uint8)
            end += size
    quants = fields.quants.flatten(1, 2).view(torch.uint8)
    panels[..., end:].unflatten(2, (-1, PANEL)).copy_(quants.view(*panels.shape[:2], -1, PANEL))


class _Fields(NamedTuple):
    """Of blocks `[..., bytes, PANEL]`: `scales` and `offsets` `[..., groups, PANEL]`, float16 or float32, and `quants`
    `[..., inputs, PANEL]` int8; where they have four bits, `[..., inputs / 2, PANEL]` uint8, two neighbours in a byte,
    the first in its low half.
    """

    scales: Tensor
    offsets: Tensor | None
    quants: Tensor


def _halves(blocks: Tensor, first: int) -> Tensor:
    """The float16 at byte `first`, `[..., 1, PANEL]`."""
    return blocks[..., first : first + 2, :].transpose(-1, -2).contiguous().view(torch.float16).transpose(-1, -2)


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


def _q8_0(blocks: Tensor) -> _Fields:
    return _Fields(_halves(blocks, 0), None, blocks[..., 2:, :].view(torch.int8))


def _q4_0(blocks: Tensor) -> _Fields:
    return _Fields(_halves(blocks, 0), None, _pairs(blocks[..., 2:, :]) ^ 0x88)  # each minus 8


def _q4_1(blocks: Tensor) -> _Fields:
    return _Fields(_halves(blocks, 0), _halves(blocks, 2), _pairs(blocks[..., 4:, :]))


def _q5_0(blocks: Tensor) -> _Fields:
    quants = _nibbles(blocks[..., 6:, :]) | _fifth_bits(blocks, 2)
    return _Fields(_halves(blocks, 0), None, quants.view(torch.int8) - 16)


def _q5_1(blocks: Tensor) -> _Fields:
    quants = _nibbles(blocks[..., 8:, :]) | _fifth_bits(blocks, 4)
    return _Fields(_halves(blocks, 0), _halves(blocks, 2), quants.view(torch.int8))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets `[..., 8, PANEL]`, float32, of blocks that begin as those of Q4_K: factors have six bits."""
    low, high, rest = blocks[..., 4:16, :].unflatten(-2, (3, 4)).unbind(-3)
    scales = torch.cat((low & 63, (rest & 15) | (low >> 2 & 48)), dim=-2)
    offsets = torch.cat((high & 63, (rest >> 4) | (high >> 2 & 48)), dim=-2)
    return _halves(blocks, 0).float() * scales.float(), -(_halves(blocks, 2).float() * offsets.float())


def _q4_k(blocks: Tensor) -> _Fields:
    pairs = _pairs(blocks[..., 16:, :].unflatten(-2, (4, 32)))
    return _Fields(*_k_scales(blocks), pairs.flatten(-3, -2))


def _q5_k(blocks: Tensor) -> _Fields:
    fifth = (blocks[..., None, 16:48, :] >> _shifts(blocks, 1) & 1) << 4
    low = _nibbles(blocks[..., 48:, :].unflatten(-2, (4, 32))).flatten(-3, -2).unflatten(-2, (8, 32))
    return _Fields(*_k_scales(blocks), (low | fifth).flatten(-3, -2).view(torch.int8))


def _q6_k(blocks: Tensor) -> _Fields:
    low = _nibbles(blocks[..., :128, :].unflatten(-2, (2, 64)))
    high = (blocks[..., 128:192, :].unflatten(-2, (2, 1, 32)) >> _shifts(blocks, 2) & 3) << 4
    quants = (low.unflatten(-2, (4, 32)) | high).flatten(-4, -2)
    scales = _halves(blocks, 208).float() * blocks[..., 192:208, :].view(torch.int8).float()
    return _Fields(scales, None, quants.view(torch.int8) - 32)


_KINDS: dict[str, tuple[int, Callable[[Tensor], _Fields]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and how blocks are read, by the name of their kind."""
