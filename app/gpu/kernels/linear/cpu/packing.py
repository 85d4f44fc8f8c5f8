"""Matrices as panels, in the types that they have: the formats, and cutting a matrix to them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.kernels.cpu.compile import ELEMENTS
from app.gpu.kernels.cpu.openmp import lone_threads
from app.gpu.kernels.linear.block_fields import KINDS
from app.gpu.kernels.linear.cpu.blocks import ROUNDED as ROUNDED_QUANTS
from app.gpu.kernels.linear.cpu.pairs import HALVES
from app.gpu.kernels.linear.cpu.weights import PANEL
from app.gpu.kernels.linear.matrix import BlockMatrix, Matrix, dense_of

_ROWS = 8 * PANEL
"""Rows of blocks that are taken apart at a time, so that what they become stays in the cache."""


@dataclass(frozen=True, slots=True)
class PanelFormat:
    """A type of weights. `element` stands for it inside a kernel; the weights of `group` inputs take `group_bytes`.

    `inputs` is the type of what is multiplied with them.
    """

    element: Any
    group: int
    group_bytes: int
    inputs: torch.dtype = torch.float32


DENSE = {dtype: PanelFormat(element, 1, PANEL * dtype.itemsize) for dtype, element in ELEMENTS.items()}
"""Of dense panels `[panels, inputs, PANEL]`."""


PAIRED = PanelFormat(HALVES, 2, HALVES.itemsize, torch.bfloat16)
"""Of panels `[panels, inputs / 2, PANEL, 2]` bfloat16."""


def _blocks(group: int, quants: Any, *, bits: int, scales: Any, offsets: bool) -> PanelFormat:
    """A record of a group of inputs: see `BLOCKS`."""
    fields: list[Any] = [("scales", scales, PANEL)]
    if offsets:
        fields.append(("offsets", scales, PANEL))
    fields.append(("quants", quants, (group, PANEL)) if bits == 8 else ("pairs", quants, (group // 2, PANEL)))
    record = np.dtype(fields)
    return PanelFormat(record, group, record.itemsize)


BLOCKS = {
    "Q8_0": _blocks(32, np.int8, bits=8, scales=np.float16, offsets=False),
    "Q4_0": _blocks(32, np.int8, bits=4, scales=np.float16, offsets=False),
    "Q4_1": _blocks(32, np.uint8, bits=4, scales=np.float16, offsets=True),
    "Q5_0": _blocks(32, np.int8, bits=8, scales=np.float16, offsets=False),
    "Q5_1": _blocks(32, np.int8, bits=8, scales=np.float16, offsets=True),
    "Q4_K": _blocks(32, np.uint8, bits=4, scales=np.float32, offsets=True),
    "Q5_K": _blocks(32, np.int8, bits=8, scales=np.float32, offsets=True),
    "Q6_K": _blocks(16, np.int8, bits=8, scales=np.float32, offsets=False),
}
"""Of panels of blocks `[panels, bytes]` uint8, by the name of their kind. A panel is a run of records, one for each
group of inputs:

    scales    [PANEL], float16 or float32
    offsets   [PANEL], of the same type; some kinds have none
    quants    [group, PANEL] int8; or `pairs` [group / 2, PANEL], two inputs in a byte, the first in its low half
"""


def _rounded(format: PanelFormat) -> PanelFormat:
    *fields, (last, kind, shape) = format.element.descr
    element = np.dtype([*fields, (ROUNDED_QUANTS + last, kind, shape)])
    return PanelFormat(element, format.group, format.group_bytes, torch.bfloat16)


ROUNDED = {kind: _rounded(format) for kind, format in BLOCKS.items()}
"""The same records for products in bfloat16, to which each weight is rounded as it is unpacked."""


def to_panels(matrix: Matrix) -> tuple[Tensor, PanelFormat]:
    """The panels of a matrix `[out, in]`, and their type; also on `meta`. Outputs that the last panel lacks are zeros.

    Types that no kernel reads become float32.
    """
    if isinstance(matrix, BlockMatrix) and matrix.kind in BLOCKS:
        return _pack_blocks(matrix), BLOCKS[matrix.kind]
    dense = dense_of(matrix)
    dense = dense if dense.dtype in DENSE else dense.float()
    return _cut(dense), DENSE[dense.dtype]


def to_pairs(matrix: Matrix) -> tuple[Tensor, PanelFormat]:
    """As `to_panels`, for products in bfloat16: blocks as they are, all else rounded. Inputs must be even."""
    if isinstance(matrix, BlockMatrix) and matrix.kind in BLOCKS:
        return _pack_blocks(matrix), ROUNDED[matrix.kind]
    panels = _cut(dense_of(matrix).bfloat16())
    return panels.view(len(panels), -1, 2, PANEL).transpose(2, 3).contiguous(), PAIRED


def _cut(rows: Tensor) -> Tensor:
    """Rows `[out, width]` as `[panels, width, PANEL]`."""
    outputs, width = rows.shape
    padded = F.pad(rows, (0, 0, 0, -outputs % PANEL)) if outputs % PANEL else rows
    return padded.view(-1, PANEL, width).transpose(1, 2).contiguous()


def _pack_blocks(matrix: BlockMatrix) -> Tensor:
    """Records of groups, panel by panel: `[panels, bytes]` uint8."""
    outputs, inputs = matrix.shape
    format = BLOCKS[matrix.kind]
    panels = matrix.rows.new_empty(-(-outputs // PANEL), inputs // format.group, format.group_bytes)
    inference = torch.is_inference_mode_enabled()

    def pack(first: int) -> None:
        start = first // PANEL
        with torch.inference_mode(inference):  # each thread has a mode of its own
            _pack(matrix.kind, matrix.rows[first : first + _ROWS], format, panels[start : start + _ROWS // PANEL])

    with lone_threads() as threads:
        for _ in threads.map(pack, range(0, outputs, _ROWS)):
            pass
    return panels.view(len(panels), -1)


def _pack(kind: str, rows: Tensor, format: PanelFormat, panels: Tensor) -> None:
    """Fill `panels` `[n, groups, group_bytes]` with rows of blocks."""
    block_bytes, read = KINDS[kind]
    fields, end = read(_cut(rows).unflatten(1, (-1, block_bytes))), 0
    for numbers in (fields.scales, fields.offsets):
        if numbers is not None:
            size = PANEL * numbers.itemsize
            panels[..., end : end + size] = numbers.flatten(1, 2).contiguous().view(torch.uint8)
            end += size
    quants = fields.quants.flatten(1, 2).view(torch.uint8)
    panels[..., end:].unflatten(2, (-1, PANEL)).copy_(quants.view(*panels.shape[:2], -1, PANEL))
