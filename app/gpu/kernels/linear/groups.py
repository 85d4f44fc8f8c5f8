"""Matrices of quantized checkpoints as they stay in memory: codes of 4 or 8 bits, and a scale for each group of inputs.

A weight is `(code - zero) * scale`, in float32, rounded once to the type in which the format's own library computes.
All formats share this one form: AWQ, GPTQ, compressed-tensors, float8 in blocks, NVFP4, MXFP4. So kernels read one.

A matrix is rows of bytes, so that it is stacked, split, streamed and looked up as blocks of a GGUF file are. A row is a
run of groups, each of which has

    4 bytes    the scale, float32
    1 byte     the zero, int8; then 3 bytes of nothing
    the rest   codes: two neighbours in a byte, the first in its low half, or a byte each
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import gcd

import torch
from torch import Tensor

HEAD_BYTES = 8
"""Of a group, before its codes."""
SLICE = 512
"""Inputs that a kernel unpacks at a time, which whole groups must make up: larger groups are several with one scale."""
_LEAST = 16
"""Inputs of the smallest group that is worth its scale."""


class Codes(StrEnum):
    """What codes stand for: signed integers, E2M1 (OCP Microscaling Formats, version 1.0), or E4M3."""

    INT4 = "int4"
    INT8 = "int8"
    FLOAT4 = "float4"
    FLOAT8 = "float8"

    @property
    def in_pairs(self) -> bool:
        """Whether a byte has two of them."""
        return self in (Codes.INT4, Codes.FLOAT4)


@dataclass(frozen=True, slots=True)
class Grouped:
    """The kind of a `BlockMatrix`. `values` is the type to which weights are rounded, float32 if they are not; `scales`
    is one that has every scale exactly.
    """

    codes: Codes
    inputs: int
    """Of a group."""
    values: torch.dtype
    scales: torch.dtype
    has_zeros: bool = False

    @property
    def code_bytes(self) -> int:
        """Of a group."""
        return self.inputs // 2 if self.codes.in_pairs else self.inputs

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of `rows` `[n, bytes]` uint8: codes `[n, groups, bytes]` uint8, scales `[n, groups]` float32 and zeros
        `[n, groups]` int8. All are views.
        """
        groups = rows.unflatten(1, (-1, HEAD_BYTES + self.code_bytes))
        zeros = groups[:, :, 4].view(torch.int8)
        return groups[:, :, HEAD_BYTES:], groups[:, :, :4].view(torch.float32)[:, :, 0], zeros

    def dequantize(self, rows: Tensor) -> Tensor:
        """The weights of `rows` `[n, bytes]` uint8, `[n, inputs]` float32."""
        codes, scales, zeros = self.parts(rows)
        numbers = code_values(self.codes, codes) - zeros.float()[:, :, None]
        return (numbers * scales[:, :, None]).to(self.values).float().flatten(1)


def code_values(codes: Codes, stored: Tensor) -> Tensor:
    """What codes `[..., n]` uint8 stand for, float32; of those that are `in_pairs`, `[..., 2 n]`."""
    if codes is Codes.FLOAT8:
        return stored.view(torch.float8_e4m3fn).float()
    if codes is Codes.INT8:
        return stored.view(torch.int8).float()
    pairs = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)
    if codes is Codes.INT4:
        return ((pairs ^ 8).view(torch.int8) - 8).float()
    bits = (pairs & 8).short() << 12 | (pairs & 7).short() << 9  # as float16 the same bits stand for a 2 ** 14th
    return bits.view(torch.float16).float() * 16384.0


def group_inputs(group: int, inputs: int) -> int | None:
    """Inputs of the groups in which rows of `inputs` are kept, whose scales are those of `group` inputs each; None if
    they are too few.
    """
    found = gcd(group, inputs, SLICE)
    return found if found >= _LEAST else None


def pack_groups(kind: Grouped, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Rows of bytes, of `codes` `[out, inputs]`: int8, or bytes as uint8; of `scales` `[out, groups]` of any type, and
    `zeros` of that shape, or None. On `meta` too.
    """
    outputs, inputs = codes.shape
    count = inputs // kind.inputs
    rows = codes.new_empty((outputs, count, HEAD_BYTES + kind.code_bytes), dtype=torch.uint8)
    if rows.is_meta:
        return rows.flatten(1)
    rows[:, :, :HEAD_BYTES] = 0
    rows[:, :, :4] = scales.float().contiguous()[:, :, None].view(torch.uint8)
    if zeros is not None:
        rows[:, :, 4] = zeros.to(torch.int8).view(torch.uint8)
    stored = codes.view(torch.uint8) if codes.itemsize == 1 else codes.to(torch.int8).view(torch.uint8)
    if kind.codes.in_pairs:
        stored = stored[:, 0::2] & 15 | stored[:, 1::2] << 4
    rows[:, :, HEAD_BYTES:] = stored.unflatten(1, (count, -1))
    return rows.flatten(1)
