"""Where a model's weights come from, a safetensors folder, a GGUF file or a seed, and as what they are handed out."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from app.domain.values import WeightsDtype
from app.gpu.kernels.linear.base import BlockMatrix, Matrix, dense_of, stored_rows
from app.gpu.kernels.linear.eight_bits import FLOAT8, INT8, quantize, require_inputs, row_bytes
from app.model_store.install import BrokenModel
from app.model_store.resolve import ResolvedModel
from app.model_store.tensors import INDEX, SINGLE, GgufIndex, StoredSize, is_indexed, shard_of_tensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By the names that safetensors and GGUF give them. Safetensors matrices of any other type become float32."""
_TYPES = {
    **_FLOATS,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_UNUSED = re.compile(r"\.(input_scale|input_zero_point|input_global_scale|[kqv]_scale|output_scale|weight_shape)$")
"""Tensors that say how to round activations or KV, which Djinn does not, or what is known anyway."""
_LAYOUTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "compressed-tensors": {
        "format": (
            *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized"),
            *("mixed-precision", "dense"),
        )
    },
    "awq": {"bits": (4,), "version": ("gemm",)},
    "gptq": {"bits": (4, 2, 8), "checkpoint_format": ("gptq", "gptq_v2")},
}
"""By method, what its other fields may say. A field that is missing says the first."""
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in 32 bits each of eight neighbouring columns is."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes of E2M1 stand for; bit 3 is the sign."""
_KINDS = {WeightsDtype.INT8: INT8, WeightsDtype.FLOAT8: FLOAT8}
"""Of blocks."""


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """Tensors are for computation in `dtype` on `device`; `matrices` is for those that need not be in `dtype`."""

    device: torch.device
    dtype: torch.dtype
    matrices: WeightsDtype = WeightsDtype.CHECKPOINT
    on_meta: bool = False
    """Whether all tensors are on `meta` instead: they have the shapes and types, and nothing is read."""

    @property
    def place(self) -> torch.device:
        """Where tensors are handed out."""
        return torch.device("meta") if self.on_meta else self.device

    @property
    def keeps_matrices(self) -> bool:
        """Whether matrices are kept as `matrices` says: a GPU, and a CPU in half types, do that with 8 bits alone."""
        return self.matrices in _KINDS or (self.device.type == "cpu" and self.dtype is torch.float32)

    def nbytes(self, stored: StoredSize) -> int:
        """Bytes of a stored tensor as it is handed out, if one with two axes is a matrix."""
        if len(stored.shape) < 2 or not self.keeps_matrices:
            return stored.elements * self.dtype.itemsize
        match self.matrices:
            case WeightsDtype.CHECKPOINT:
                return stored.nbytes
            case WeightsDtype.FLOAT32:
                return stored.elements * 4
            case WeightsDtype.BFLOAT16:
                return stored.elements * 2
            case WeightsDtype.INT8 | WeightsDtype.FLOAT8:
                inputs = stored.shape[-1]
                return stored.elements // inputs * row_bytes(_KINDS[self.matrices], inputs)

    def matrix(self, name: str, stored: Matrix) -> Matrix:
        """The matrix `name` as `matrices` says. Raises FieldOutOfRange for 8 bits if its rows have no whole blocks."""
        match self.matrices:
            case WeightsDtype.CHECKPOINT:
                known = isinstance(stored, BlockMatrix) or stored.dtype in _FLOATS.values()
                return stored if known else dense_of(stored).float()
            case WeightsDtype.FLOAT32:
                return dense_of(stored).float()
            case WeightsDtype.BFLOAT16:
                return dense_of(stored).bfloat16()
            case WeightsDtype.INT8 | WeightsDtype.FLOAT8:
                kind, (rows, inputs) = _KINDS[self.matrices], stored.shape
                if isinstance(stored, BlockMatrix) and stored.kind == kind:
                    return stored
                require_inputs(kind, inputs, name)
                return BlockMatrix(kind, quantize(kind, dense_of(stored)), (rows, inputs))


class WeightSource(ABC):
    """Hands out tensors by the names that Transformers gives them, one at a time, in one format."""

    def __init__(self, tensor_format: TensorFormat, origin: Path | None, names: Iterable[str]) -> None:
        """`names` are those of the tensors that are stored in `origin`; none if they are made."""
        self.nbytes = 0
        """Bytes of all tensors taken so far."""
        self._format = tensor_format
        self._origin = origin
        self._left = set(names)

    def holds(self, name: str) -> bool:
        """Whether a tensor `name` is stored, and not taken yet; a source that makes its tensors stores none."""
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`; `BrokenModel` if it is missing, has another shape or cannot be read."""
        stored = dense_of(self._stored(name, shape)).reshape(shape)
        tensor = stored.to(self._format.place, self._format.dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def take_matrix(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """The matrix `name` `[out, in]` of a dense layer or a table, as it is to be kept; raises as `take` does. Of
        several, `[n, out, in]`, the rows are those of all.
        """
        if not self._format.keeps_matrices:
            return self.take(name, shape).flatten(0, -2)
        stored = self._stored(name, shape)
        stored = stored.flatten(0, -2) if isinstance(stored, Tensor) else stored
        matrix = self._format.matrix(name, stored)
        self.nbytes += stored_rows(matrix).nbytes
        return matrix

    def finish(self, ignored: re.Pattern[str]) -> None:
        """Say that everything needed was taken; `BrokenModel` if a tensor is left that `ignored` does not match."""
        left = sorted(name for name in self._left if not ignored.search(name))
        if left:
            shown = ", ".join(left[:8]) + (", ..." if len(left) > 8 else "")
            said = f"{self._origin} has {len(left)} tensors the model has no use for: {shown}"
            raise BrokenModel(said, param="model")

    @abstractmethod
    def _stored(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """The tensor `name` as it is stored, in memory that no other tensor shares. Raises as `take` does."""

    def _check_off(self, name: str) -> str:
        """The stored name, which is taken now. A checkpoint of the bare decoder lacks `model.` or `transformer.`."""
        stored = name if name in self._left else name.partition(".")[2]
        if stored not in self._left:
            raise BrokenModel(f"{self._origin} has no tensor {name!r}", param="model")
        self._left.remove(stored)
        return stored

    def _require_shape(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise BrokenModel(f"tensor {name!r} in {self._origin} is {found}, must be {shape}", param="model")


class RandomWeights(WeightSource):
    """Normal matrices and biases, norms of one. A tensor depends on the seed and its name only, not on the order."""

    def __init__(self, seed: int, config: PretrainedConfig, tensor_format: TensorFormat) -> None:
        super().__init__(tensor_format, None, ())
        self._seed = seed
        self._std: float = getattr(config, "initializer_range", 0.02)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor is made where it will live."""
        tensor = torch.empty(shape, device=self._format.place, dtype=self._format.dtype)
        if tensor.is_meta:
            return tensor
        if len(shape) == 1 and not name.endswith("bias"):
            return tensor.fill_(1.0)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        # manual_seed takes a signed 64-bit integer.
        generator = torch.Generator(self._format.device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return tensor.normal_(0.0, self._std, generator=generator)


class SafetensorsFolder(WeightSource):
    """`model.safetensors`, or the shards that `model.safetensors.index.json` lists, as Transformers saves them. Tensors
    are copies: where another program truncates a mapped file, the next look at it ends the process.
    """

    def __init__(self, folder: Path, tensor_format: TensorFormat) -> None:
        super().__init__(tensor_format, folder, ())
        self._folder = folder
        self._files: dict[str, Any] = {}
        listed = shard_of_tensors(folder)
        if listed is None:
            if not (folder / SINGLE).exists():
                raise BrokenModel(f"{folder} has neither {SINGLE} nor {INDEX}", param="model")
            listed = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        self._file_of = listed
        self._left = set(listed)

    def finish(self, ignored: re.Pattern[str]) -> None:
        """As `WeightSource.finish`. Closes the files."""
        self._files.clear()
        super().finish(ignored)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """On the format's device."""
        tensor = self._read(self._check_off(name))
        self._require_shape(name, tuple(tensor.shape), shape)
        return tensor

    def _read(self, stored: str) -> Tensor:
        file = self._open(self._file_of[stored])
        try:
            if self._format.on_meta:
                lazy = file.get_slice(stored)
                dtype = _TYPES.get(lazy.get_dtype(), torch.float64)
                return torch.empty(lazy.get_shape(), dtype=dtype, device="meta")
            tensor: Tensor = file.get_tensor(stored)
        except SafetensorError as error:
            raise BrokenModel(f"cannot read {stored!r} from {self._folder}: {error}", param="model") from error
        return tensor.clone() if tensor.device.type == "cpu" else tensor

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self._folder / file, framework="pt", device=str(self._format.device))
            except (OSError, SafetensorError) as error:
                raise BrokenModel(f"cannot read {self._folder / file}: {error}", param="model") from error
        return self._files[file]


class QuantizedFolder(SafetensorsFolder):
    """A Transformers folder whose `config.json` has a `quantization_config`. Each quantized matrix is dequantized as it
    is read, to the values that the format's own library computes, in the type of its scales.

    The tensors of a matrix `[out, in]`, by the ends of their names:

        fp8                 weight float8, weight_scale_inv for each block, or weight_scale
        compressed-tensors  weight int8 or float8, or weight_packed: integers of 1 to 8 bits in int32, or pairs of FP4
                            in uint8; weight_scale, weight_zero_point, weight_g_idx, weight_global_scale (NVFP4)
        awq                 qweight int32 [in, out / 8], qzeros, scales [groups, out]
        gptq                qweight int32 [in * bits / 32, out], qzeros, scales [groups, out], g_idx [in]

    Sources, on GitHub: vllm-project/compressed-tensors, casper-hansen/AutoAWQ, AutoGPTQ/AutoGPTQ, and Transformers.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], tensor_format: TensorFormat) -> None:
        """Raises BrokenModel for a method, or a layout of it, that is not read here."""
        super().__init__(folder, tensor_format)
        methods = {"fp8": self._fp8, "compressed-tensors": self._compressed, "awq": self._awq, "gptq": self._gptq}
        stated = {"quant_method": None, **config}
        method = str(stated["quant_method"])
        for field, known in {"quant_method": tuple(methods), **_LAYOUTS.get(method, {})}.items():
            if stated.get(field, known[0]) not in known:
                said = f"quantization_config.{field} is {stated[field]!r}; Djinn reads {', '.join(map(str, known))}"
                raise BrokenModel(f"{folder / 'config.json'}: {said}", param="model")
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
    """The first `count` integers of `bits` bits, one behind the other, in each row of `packed` `[rows, words]`."""
    first = torch.arange(count, device=packed.device) * bits
    words = packed.long() & 0xFFFFFFFF
    words = torch.cat((words, words[:, :1]), 1)  # the last integer asks for a word behind it, of which it takes no bit
    both = words[:, first // 32] | words[:, first // 32 + 1] << 32
    return (both >> first % 32 & (1 << bits) - 1).int()


def _scaled(stored: Tensor, zeros: Tensor | None, scale: Tensor, groups: Tensor | None) -> Tensor:
    """`(stored - zeros) * scale`, rounded once to the type of `scale`. `stored` is `[out, in]`; the others are for all,
    for each row, or `[out, groups]`, where `groups` `[in]` says which group an input is of.
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


class GgufFile(WeightSource):
    """The file that the index in a model's folder names, read in place. Blocks arrive on the host."""

    def __init__(self, folder: Path, tensor_format: TensorFormat) -> None:
        self._index = GgufIndex.read(folder)
        super().__init__(tensor_format, self._index.file, self._index.tensors)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Matrix:
        stored = self._check_off(name)
        tensor = self._index.tensors[stored]
        self._require_shape(name, tensor.shape, shape)
        if self._format.on_meta:
            count = shape[0] if len(shape) > 1 else 1
            rows = torch.empty((count, tensor.nbytes // count), dtype=torch.uint8, device="meta")
        else:
            rows = torch.from_numpy(self._index.rows(stored))
        if tensor.kind in _FLOATS:
            return rows.view(_FLOATS[tensor.kind]).view(shape)
        return BlockMatrix(tensor.kind, rows, (len(rows), shape[-1]))


def weights_of(
    model: ResolvedModel, device: torch.device, dtype: torch.dtype, *, on_meta: bool = False
) -> WeightSource:
    """The weights of `model`, which arrive on `device`: matrices as the model says, if they are multiplied so there,
    all others as `dtype`. Or, `on_meta`, their shapes and types: nothing is read.
    """
    tensor_format = TensorFormat(device, dtype, model.weights_dtype, on_meta)
    if model.folder is None:
        return RandomWeights(model.seed, model.config, tensor_format)
    if is_indexed(model.folder):
        return GgufFile(model.folder, tensor_format)
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is None:
        return SafetensorsFolder(model.folder, tensor_format)
    return QuantizedFolder(model.folder, quantization, tensor_format)


def take_output_weight(source: WeightSource, config: PretrainedConfig, embedding: Matrix) -> Matrix:
    """`lm_head.weight` `[vocab, hidden]`; as in Transformers, the embedding where they are tied and none is stored."""
    if config.tie_word_embeddings and not source.holds("lm_head.weight"):
        return embedding
    rows, hidden = embedding.shape
    return source.take_matrix("lm_head.weight", (rows, hidden))
