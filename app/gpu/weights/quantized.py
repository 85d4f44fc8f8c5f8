"""Checkpoints with quantized matrices, read as the values that they stand for: what the format's own library makes of
them, in the type of their scales.

The tensors of a matrix `[out, in]`, whose name is before the dot:

    fp8                 weight float8, weight_scale_inv float32, one for each block (DeepSeek, Qwen), or weight_scale
    compressed-tensors  weight int8 or float8, or weight_packed (integers of 1 to 8 bits in int32, or pairs of FP4 in
                        uint8), weight_scale for the tensor, each row or each group, weight_zero_point, weight_g_idx,
                        weight_global_scale (NVFP4)
    awq                 qweight int32 [in, out / 8], qzeros, scales [groups, out]
    gptq                qweight int32 [in * bits / 32, out], qzeros, scales [groups, out], g_idx [in]

Sources: https://github.com/vllm-project/compressed-tensors, https://github.com/casper-hansen/AutoAWQ,
https://github.com/AutoGPTQ/AutoGPTQ, and Transformers' `integrations/finegrained_fp8.py`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.gpu.weights.source import SafetensorsFolder, TensorFormat
from app.model_store.install import BrokenModel

_UNUSED = re.compile(r"\.(input_scale|input_zero_point|input_global_scale|[kqv]_scale|output_scale|weight_shape)$")
"""Tensors that say how to round activations or KV, which Djinn does not, or what is known anyway."""
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in 32 bits each of eight neighbouring columns is."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes of E2M1 stand for; bit 3 is the sign."""


class QuantizedFolder(SafetensorsFolder):
    """A Transformers folder whose `config.json` has a `quantization_config`. Matrices that it leaves out are stored as
    in any other folder.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], tensor_format: TensorFormat) -> None:
        """Raises BrokenModel for a method that is not read here."""
        super().__init__(folder, tensor_format)
        methods = {"fp8": self._fp8, "compressed-tensors": self._compressed, "awq": self._awq, "gptq": self._gptq}
        method = config.get("quant_method")
        if method not in methods:
            known = ", ".join(methods)
            raise BrokenModel(
                f"{folder / 'config.json'}: quantization_config.quant_method is {method!r}; Djinn reads {known}",
                param="model",
            )
        self._config = config
        self._dequantized = methods[method]
        self._left = {name for name in self._left if not _UNUSED.search(name)}

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        base, found = name.removesuffix(".weight"), None
        if base != name and len(shape) == 2:
            try:
                found = self._dequantized(base, (shape[0], shape[1]))
            except (RuntimeError, IndexError) as error:  # the shapes of its tensors do not go together
                why = f"the tensors of {base!r} in {self._folder} do not fit: {error}"
                raise BrokenModel(why, param="model") from error
        if found is None:
            return super()._stored(name, shape)
        self._require_shape(name, tuple(found.shape), shape)
        return found

    def _has(self, base: str, kind: str) -> bool:
        name = f"{base}.{kind}"
        return self.holds(name) or self.holds(name.partition(".")[2])

    def _part(self, base: str, kind: str) -> Tensor:
        """One tensor of a matrix. Raises BrokenModel if there is none."""
        return self._read(self._check_off(f"{base}.{kind}"))

    def _fp8(self, base: str, shape: tuple[int, int]) -> Tensor | None:
        if not self._has(base, "weight_scale_inv"):
            return self._compressed(base, shape)
        rows, inputs = self._config.get("weight_block_size") or (128, 128)
        of_rows = self._part(base, "weight_scale_inv").float().repeat_interleave(rows, 0)[: shape[0]]
        return self._part(base, "weight").float() * of_rows.repeat_interleave(inputs, 1)[:, : shape[1]]

    def _compressed(self, base: str, shape: tuple[int, int]) -> Tensor | None:
        if not self._has(base, "weight_scale"):
            return None
        scale = self._part(base, "weight_scale")
        zeros, groups = (
            self._part(base, kind) if self._has(base, kind) else None for kind in ("weight_zero_point", "weight_g_idx")
        )
        if not self._has(base, "weight_packed"):
            return _scaled(self._part(base, "weight"), zeros, scale, groups)
        packed = self._part(base, "weight_packed")
        if packed.dtype is torch.uint8:
            codes = torch.stack((packed & 15, packed >> 4), 2).flatten(1).long()
            values = torch.tensor(_FP4, device=codes.device)[codes & 7]
            scale = scale.float() / self._part(base, "weight_global_scale")
            return _scaled(torch.where(codes > 7, -values, values), None, scale, None).bfloat16()
        bits = packed.shape[1] * 32 // shape[1]
        offset = 1 << (bits - 1)
        if zeros is not None and zeros.dtype is torch.int32:
            zeros = _unpacked(zeros.T, bits, shape[0]).T - offset
        return _scaled(_unpacked(packed, bits, shape[1]) - offset, zeros, scale, groups)

    def _awq(self, base: str, shape: tuple[int, int]) -> Tensor | None:
        if not self._has(base, "qweight"):
            return None
        packed, zeros, scale = (self._part(base, kind) for kind in ("qweight", "qzeros", "scales"))
        shifts = 4 * torch.tensor(_AWQ_PLACES, dtype=torch.int32, device=packed.device)
        columns, offsets = ((each[:, :, None] >> shifts & 15).flatten(1) for each in (packed, zeros))
        return _scaled(columns.T, offsets.T, scale.T, None)

    def _gptq(self, base: str, shape: tuple[int, int]) -> Tensor | None:
        if not self._has(base, "qweight"):
            return None
        packed, zeros, scale = (self._part(base, kind) for kind in ("qweight", "qzeros", "scales"))
        groups = self._part(base, "g_idx") if self._has(base, "g_idx") else None
        bits = packed.shape[0] * 32 // shape[1]
        offsets = _unpacked(zeros, bits, shape[0])
        if self._config.get("checkpoint_format") != "gptq_v2":
            offsets = offsets + 1 & (1 << bits) - 1  # what is stored is one less
        return _scaled(_unpacked(packed.T, bits, shape[1]), offsets.T, scale.T, groups)


def _unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` integers of each row of `packed` `[rows, words]` int32, without sign, as int32: integer i is
    the `bits` bits from bit `i * bits` of its row on.
    """
    first = torch.arange(count, device=packed.device) * bits
    words = packed.long() & 0xFFFFFFFF
    words = torch.cat((words, words[:, :1]), 1)  # the last integer asks for a word behind it, of which it takes no bit
    both = words[:, first // 32] | words[:, first // 32 + 1] << 32
    return (both >> first % 32 & (1 << bits) - 1).int()


def _scaled(stored: Tensor, zeros: Tensor | None, scale: Tensor, groups: Tensor | None) -> Tensor:
    """`(stored - zeros) * scale` in the type of `scale`, which it is rounded to once. `stored` is `[out, in]`; the
    others are for all, for each row, or `[out, groups]`, where `groups` `[in]` says which group an input is of.
    """
    rows, inputs = stored.shape

    def spread(each: Tensor) -> Tensor:
        if each.shape == (rows,):
            each = each[:, None]
        if each.dim() < 2 or each.shape[1] == 1:
            return each.float()
        of_input = torch.arange(inputs, device=each.device) * each.shape[1] // inputs
        return each.float()[:, of_input if groups is None else groups.long()]

    values = stored.float() if zeros is None else stored.float() - spread(zeros)
    return (values * spread(scale)).to(scale.dtype)
