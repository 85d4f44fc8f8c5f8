"""The one way to a model's weights: from its folder, its GGUF files or its seed to a `WeightSource`.

Where a folder's `config.json` has a `quantization_config`, matrices stay in codes and scales, as the format has them.
The tensors of a matrix `[out, in]`, by the ends of their names:

    fp8                 weight float8, weight_scale_inv for each block, or weight_scale
    compressed-tensors  weight int8 or float8, or weight_packed: integers of 1 to 8 bits in int32, or pairs of FP4 in
                        uint8; weight_scale, weight_zero_point, weight_g_idx, weight_global_scale (NVFP4)
    awq                 qweight int32 [in, out / 8], qzeros, scales [groups, out]
    gptq                qweight int32 [in * bits / 32, out], qzeros, scales [groups, out], g_idx [in]

and those of `NAME` `[experts, in, out]`, all experts of a layer:

    mxfp4               NAME_blocks uint8 [experts, out, in / 32, 16], pairs of FP4; NAME_scales uint8, exponents
    fp8                 NAME float8 [experts, out, in], NAME_scale_inv

Sources, on GitHub: vllm-project/compressed-tensors, casper-hansen/AutoAWQ, AutoGPTQ/AutoGPTQ, and Transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.gpu.kernels.linear.base import BlockMatrix, Matrix, dense_of
from app.gpu.kernels.linear.encodings import Codes, Grouped, code_values, group_inputs, pack_groups
from app.gpu.weights.source import FLOATS, RandomWeights, SafetensorsFolder, TensorFormat, WeightSource, require_finite
from app.model_store.install import BrokenModel
from app.model_store.resolve import ResolvedModel
from app.model_store.tensors import GgufIndex, is_indexed

_UNUSED = re.compile(r"\.(input_scale|input_zero_point|input_global_scale|[kqv]_scale|output_scale|weight_shape)$")
"""Tensors that say how to round activations or KV, which Djinn does not, or what is known anyway."""
_PART = re.compile(r"[._](scales?|scale_inv|qzeros|zero_point|g_idx)$")
"""Tensors that belong to a matrix, mostly."""
_LAYOUTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {},
    "compressed-tensors": {
        "format": (
            *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized"),
            *("mixed-precision", "dense"),
        )
    },
    "awq": {"bits": (4,), "version": ("gemm",)},
    "gptq": {"bits": (4, 2, 8), "checkpoint_format": ("gptq", "gptq_v2")},
    "mxfp4": {},
}
"""By method, what its other fields may say. A field that is missing says the first."""
_Read = Callable[[str, tuple[int, int]], Matrix | None]
"""Reads a matrix by the name of its module and its shape; None: it is not quantized."""
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in 32 bits each of eight neighbouring columns is."""
_BLOCK = 128
"""Rows and inputs of a block of float8, where the config does not say."""
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


def require_known(folder: Path, config: Mapping[str, Any]) -> str:
    """The method of a `quantization_config`. Raises BrokenModel for one, or a layout of it, that is not read here."""
    stated = {"quant_method": None, **config}
    method = str(stated["quant_method"])
    for field, known in {"quant_method": tuple(_LAYOUTS), **_LAYOUTS.get(method, {})}.items():
        if stated.get(field, known[0]) not in known:
            said = f"quantization_config.{field} is {stated[field]!r}; Djinn reads {', '.join(map(str, known))}"
            raise BrokenModel(f"{folder / 'config.json'}: {said}", param="model")
    return method


class QuantizedFolder(SafetensorsFolder):
    """A Transformers folder with a `quantization_config`. Weights have the values that the format's own library has,
    in the type of its scales. Matrices are in groups (see `linear.encodings`), or dense where no groups fit.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], tensor_format: TensorFormat, *, of_text: bool = False
    ) -> None:
        """Raises BrokenModel as `require_known`."""
        super().__init__(folder, tensor_format, of_text=of_text)
        method = require_known(folder, config)
        methods = {"fp8": self._fp8, "compressed-tensors": self._compressed, "awq": self._awq, "gptq": self._gptq}
        self._config = config
        self._matrix: _Read = methods.get(method, lambda base, shape: None)
        self._left = {name for name in self._left if not _UNUSED.search(name)}

    def dense(self) -> dict[str, Tensor]:
        """All tensors, as a checkpoint has them that was never quantized: what is quantized as the format's dtype."""
        state = dict[str, Tensor]()
        for stored in sorted(self._left, key=lambda name: (_PART.search(name) is not None, name)):
            if stored in self._left:  # no part of a matrix before it
                base, _, end = stored.rpartition(".")
                name = f"{base}.weight" if end in ("qweight", "weight_packed") else stored.removesuffix("_blocks")
                found = dense_of(self._stored(name, self._shape_of(base, end, stored)))
                state[name] = found.to(self._format.dtype) if found.is_floating_point() else found
        return state

    def _shape_of(self, base: str, end: str, stored: str) -> tuple[int, ...]:
        """The shape of what the tensor `stored` is a part of."""
        shape = self._shape(stored)
        match end:
            case "qweight" if self._config["quant_method"] == "awq":
                return 8 * shape[1], shape[0]
            case "qweight":
                return shape[1], shape[0] * 32 // int(self._config.get("bits", 4))
            case "weight_packed" if f"{base}.weight_shape" in self._file_of:
                return tuple(int(length) for length in self._read(f"{base}.weight_shape"))
            case "weight_packed":
                return shape[0], 2 * shape[1]
        if stored.endswith("_blocks"):
            return shape[0], shape[2] * shape[3] * 2, shape[1]
        return shape

    def _stored(self, name: str, shape: tuple[int, ...]) -> Matrix:
        base = name.removesuffix(".weight")
        found: Matrix | None = None
        try:
            if base != name and len(shape) == 2:
                found = self._matrix(base, (shape[0], shape[1]))
            elif len(shape) == 3:
                found = self._experts(name)
        except (RuntimeError, IndexError) as error:  # the shapes of its tensors do not go together
            why = f"the tensors of {base!r} in {self._folder} do not fit: {error}"
            raise BrokenModel(why, param="model") from error
        if found is None:
            return super()._stored(name, shape)
        self._require_shape(name, tuple(found.shape), shape)
        return found

    def _has(self, name: str) -> bool:
        return self.holds(name) or self.holds(name.partition(".")[2])

    def _part(self, name: str) -> Tensor:
        """One tensor of a matrix. Raises BrokenModel if there is none."""
        return self._read(self._check_off(name))

    def _finite(self, name: str, scales: Tensor) -> Tensor:
        """The scales of the tensor `name` that the matrix has; others, of padding, may be anything. Raises BrokenModel
        if they are not finite.
        """
        require_finite(name, scales, self._origin, has="scales")
        return scales

    def _of_blocks(self, name: str, rows: int, inputs: int) -> Tensor:
        """The scales `name` of the blocks of matrices `[rows, inputs]`."""
        block = self._blocks()
        return self._finite(name, self._part(name)[..., : -(-rows // block[0]), : -(-inputs // block[1])])

    def _optional(self, name: str) -> Tensor | None:
        return self._part(name) if self._has(name) else None

    def _experts(self, name: str) -> Tensor | None:
        """The matrices of all experts: `[experts, in, out]` of MXFP4, in bfloat16, as Transformers has them."""
        if self._has(f"{name}_blocks"):
            values = code_values(Codes.FLOAT4, self._part(f"{name}_blocks"))
            exponents = self._part(f"{name}_scales").int() - 127
            return torch.ldexp(values, exponents[..., None]).bfloat16().flatten(2).transpose(1, 2).contiguous()
        if self._has(f"{name}_scale_inv"):
            rows, block = self._part(name), self._blocks()
            scales = self._of_blocks(f"{name}_scale_inv", *rows.shape[1:]).float()
            spread = scales.repeat_interleave(block[0], 1)[:, : rows.shape[1]].repeat_interleave(block[1], 2)
            return rows.float() * spread[:, :, : rows.shape[2]]
        return None

    def _blocks(self) -> tuple[int, int]:
        """Rows and inputs of a block."""
        rows, inputs = self._config.get("weight_block_size") or (_BLOCK, _BLOCK)
        return int(rows), int(inputs)

    def _fp8(self, base: str, shape: tuple[int, int]) -> Matrix | None:
        if not self._has(f"{base}.weight_scale_inv"):
            return self._compressed(base, shape)
        scale, (rows, inputs) = self._of_blocks(f"{base}.weight_scale_inv", *shape), self._blocks()
        of_rows = scale.float().repeat_interleave(rows, 0)[: shape[0]]
        return _in_groups(self._part(f"{base}.weight"), None, of_rows, inputs, values=torch.float32, kept=scale.dtype)

    def _compressed(self, base: str, shape: tuple[int, int]) -> Matrix | None:
        if not self._has(f"{base}.weight_scale"):
            return None
        scale, zeros = self._part(f"{base}.weight_scale"), self._optional(f"{base}.weight_zero_point")
        places, packed = self._optional(f"{base}.weight_g_idx"), self._optional(f"{base}.weight_packed")
        bits = 8
        if packed is None:
            stored = self._part(f"{base}.weight")
        elif packed.dtype is torch.uint8:
            whole = f"{base}.weight_global_scale"
            scale = self._finite(f"{base}.weight_scale", scale.float() / self._finite(whole, self._part(whole)))
            codes, group = torch.stack((packed & 15, packed >> 4), 2).flatten(1), shape[1] // scale.shape[1]
            return _in_groups(codes, None, scale, group, values=torch.bfloat16)
        else:
            bits = packed.shape[1] * 32 // shape[1]
            stored = _unpacked(packed, bits, shape[1]) - (1 << bits - 1)
            if zeros is not None and zeros.dtype is torch.int32:
                zeros = _unpacked(zeros.T, bits, shape[0]).T - (1 << bits - 1)
        scale = _two_axes(scale, shape[0])
        zeros = None if zeros is None else _two_axes(zeros, shape[0])
        group = shape[1] // scale.shape[1] if shape[1] % scale.shape[1] == 0 else _BLOCK
        scale = self._finite(f"{base}.weight_scale", scale[:, : -(-shape[1] // group)])
        return _in_groups(stored, zeros, scale, group, places, bits=bits)

    def _awq(self, base: str, shape: tuple[int, int]) -> Matrix | None:
        if not self._has(f"{base}.qweight"):
            return None
        packed, zeros, scale = (self._part(f"{base}.{kind}") for kind in ("qweight", "qzeros", "scales"))
        self._finite(f"{base}.scales", scale)
        shifts = 4 * torch.tensor(_AWQ_PLACES, dtype=torch.int32, device=packed.device)
        columns, offsets = ((each[:, :, None] >> shifts & 15).flatten(1) - 8 for each in (packed, zeros))
        return _in_groups(columns.T, offsets.T, scale.T, shape[1] // len(scale), bits=4)

    def _gptq(self, base: str, shape: tuple[int, int]) -> Matrix | None:
        if not self._has(f"{base}.qweight"):
            return None
        packed, zeros, scale = (self._part(f"{base}.{kind}") for kind in ("qweight", "qzeros", "scales"))
        self._finite(f"{base}.scales", scale)
        places = self._optional(f"{base}.g_idx")
        if not self._config.get("desc_act", True):
            places = None  # they are in order
        bits = packed.shape[0] * 32 // shape[1]
        offsets, middle = _unpacked(zeros, bits, shape[0]), 1 << bits - 1
        if self._config.get("checkpoint_format") != "gptq_v2":
            offsets = offsets + 1 & (1 << bits) - 1  # what is stored is one less
        stored = _unpacked(packed.T, bits, shape[1]) - middle
        return _in_groups(stored, offsets.T - middle, scale.T, shape[1] // len(scale), places, bits=bits)


def _two_axes(each: Tensor, rows: int) -> Tensor:
    """Scales or zeros of the whole matrix, of its rows, or of blocks of them, as `[rows, groups]`."""
    each = each.reshape(-1, 1) if each.dim() < 2 else each
    if len(each) in (1, rows):
        return each.expand(rows, -1)
    return each.repeat_interleave(rows // len(each) if rows % len(each) == 0 else _BLOCK, 0)[:rows]


def _unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` integers of `bits` bits, one behind the other, in each row of `packed` `[rows, words]`."""
    if 32 % bits == 0:  # none is in two words, and it takes a tenth of the time
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
        return (packed[:, :, None] >> shifts & (1 << bits) - 1).flatten(1)[:, :count]
    first = torch.arange(count, device=packed.device) * bits
    words = packed.long() & 0xFFFFFFFF
    words = torch.cat((words, words[:, :1]), 1)  # the last integer asks for a word behind it, of which it takes no bit
    both = words[:, first // 32] | words[:, first // 32 + 1] << 32
    return (both >> first % 32 & (1 << bits) - 1).int()


def _in_groups(
    stored: Tensor,
    zeros: Tensor | None,
    scale: Tensor,
    group: int,
    places: Tensor | None = None,
    *,
    bits: int = 8,
    values: torch.dtype | None = None,
    kept: torch.dtype | None = None,
) -> Matrix:
    """`(stored - zeros) * scale`, rounded once to `values`, by default the type of `scale`: `stored` `[out, in]` has
    signed integers of `bits` bits, float8, or codes of FP4 as uint8. The others are `[out, groups]`, each of `group`
    inputs in order, unless `places` `[in]` says which is whose. `kept` is the type that has all scales exactly.
    """
    (rows, inputs), values = stored.shape, scale.dtype if values is None else values
    codes = Codes.INT4 if bits <= 4 else Codes.INT8
    if stored.dtype is torch.uint8:
        codes = Codes.FLOAT4
    elif stored.is_floating_point():
        codes = Codes.FLOAT8
    if values not in _SCALES:
        raise RuntimeError(f"scales are {scale.dtype}")
    kept = scale.dtype if kept is None else kept
    width = group_inputs(group, inputs)
    if width is None or places is not None or stored.dtype is torch.float8_e5m2:
        each = torch.arange(inputs, device=scale.device) // group if places is None else places.long()
        numbers = code_values(codes, stored)[:, ::2] if codes is Codes.FLOAT4 else stored.float()
        offsets = 0.0 if zeros is None else zeros.float()[:, each]
        return ((numbers - offsets) * scale.float()[:, each]).to(values)
    kind = Grouped(codes, width, values, kept if kept in _SCALES else torch.float32, zeros is not None)
    each = torch.arange(0, inputs, width, device=scale.device) // group
    packed = pack_groups(kind, stored, scale[:, each], None if zeros is None else zeros[:, each])
    return BlockMatrix(kind, packed, (rows, inputs))


class GgufFile(WeightSource):
    """The file that the index in a model's folder names, read in place. Blocks arrive on the host."""

    def __init__(self, folder: Path, tensor_format: TensorFormat) -> None:
        self._index = GgufIndex.read(folder)
        super().__init__(tensor_format, self._index.files[0], self._index.tensors)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Matrix:
        stored = self._check_off(name)
        tensor = self._index.tensors[stored]
        self._require_shape(name, tensor.shape, shape)
        if self._format.on_meta:
            rows = torch.empty(tensor.nbytes, dtype=torch.uint8, device="meta")
        else:
            rows = torch.from_numpy(self._index.rows(stored))
        if tensor.kind in FLOATS:
            return rows.view(FLOATS[tensor.kind]).view(shape)
        rows = rows.view(prod(shape[:-1]), -1)
        matrix = BlockMatrix(tensor.kind, rows, (len(rows), shape[-1]))
        require_finite(name, matrix.scales, self._origin, has="scales")
        return matrix


def weights_of(
    model: ResolvedModel, device: torch.device, dtype: torch.dtype, *, on_meta: bool = False, on_gpu: bool = False
) -> WeightSource:
    """The weights of `model`, of its text model if it has others too. They arrive on `device`: matrices as the model
    says, if they are multiplied so there, or `on_gpu`, all others as `dtype`. Or, `on_meta`, their shapes and types:
    nothing is read.
    """
    tensor_format = TensorFormat(device, dtype, model.weights_dtype, on_meta, on_gpu)
    if model.folder is None:
        return RandomWeights(model.seed, model.config, tensor_format)
    if is_indexed(model.folder):
        return GgufFile(model.folder, tensor_format)
    quantization = getattr(model.config, "quantization_config", None)
    of_text = model.config.get_text_config() is not model.config
    if quantization is None:
        return SafetensorsFolder(model.folder, tensor_format, of_text=of_text)
    return QuantizedFolder(model.folder, quantization, tensor_format, of_text=of_text)
