"""The parts of GGUF's quantized blocks: scales, offsets and quants, for which each weight is `scale * quant + offset`.

Quants are whole numbers. For these kinds the product of scale and quant needs no rounding, so that a multiply-add has
the bits of gguf's own `dequantize`, which rounds the product before it adds the offset.

Blocks are read many at a time, as `[..., bytes, PANEL]` uint8: each byte beside those at its place in the rows of a
panel. Bytes that lie together are then treated alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockFields:
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


def _q8_0(blocks: Tensor) -> BlockFields:
    return BlockFields(_halves(blocks, 0), None, blocks[..., 2:, :].view(torch.int8))


def _q4_0(blocks: Tensor) -> BlockFields:
    return BlockFields(_halves(blocks, 0), None, _pairs(blocks[..., 2:, :]) ^ 0x88)  # each minus 8


def _q4_1(blocks: Tensor) -> BlockFields:
    return BlockFields(_halves(blocks, 0), _halves(blocks, 2), _pairs(blocks[..., 4:, :]))


def _q5_0(blocks: Tensor) -> BlockFields:
    quants = _nibbles(blocks[..., 6:, :]) | _fifth_bits(blocks, 2)
    return BlockFields(_halves(blocks, 0), None, quants.view(torch.int8) - 16)


def _q5_1(blocks: Tensor) -> BlockFields:
    quants = _nibbles(blocks[..., 8:, :]) | _fifth_bits(blocks, 4)
    return BlockFields(_halves(blocks, 0), _halves(blocks, 2), quants.view(torch.int8))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets `[..., 8, PANEL]`, float32, of blocks that begin as those of Q4_K: factors have six bits."""
    low, high, rest = blocks[..., 4:16, :].unflatten(-2, (3, 4)).unbind(-3)
    scales = torch.cat((low & 63, (rest & 15) | (low >> 2 & 48)), dim=-2)
    offsets = torch.cat((high & 63, (rest >> 4) | (high >> 2 & 48)), dim=-2)
    return _halves(blocks, 0).float() * scales.float(), -(_halves(blocks, 2).float() * offsets.float())


def _q4_k(blocks: Tensor) -> BlockFields:
    pairs = _pairs(blocks[..., 16:, :].unflatten(-2, (4, 32)))
    return BlockFields(*_k_scales(blocks), pairs.flatten(-3, -2))


def _q5_k(blocks: Tensor) -> BlockFields:
    fifth = (blocks[..., None, 16:48, :] >> _shifts(blocks, 1) & 1) << 4
    low = _nibbles(blocks[..., 48:, :].unflatten(-2, (4, 32))).flatten(-3, -2).unflatten(-2, (8, 32))
    return BlockFields(*_k_scales(blocks), (low | fifth).flatten(-3, -2).view(torch.int8))


def _q6_k(blocks: Tensor) -> BlockFields:
    low = _nibbles(blocks[..., :128, :].unflatten(-2, (2, 64)))
    high = (blocks[..., 128:192, :].unflatten(-2, (2, 1, 32)) >> _shifts(blocks, 2) & 3) << 4
    quants = (low.unflatten(-2, (4, 32)) | high).flatten(-4, -2)
    scales = _halves(blocks, 208).float() * blocks[..., 192:208, :].view(torch.int8).float()
    return BlockFields(scales, None, quants.view(torch.int8) - 32)


KINDS: dict[str, tuple[int, Callable[[Tensor], BlockFields]]] = {
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
