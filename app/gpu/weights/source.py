"""Where a model's weights come from, a safetensors folder or a seed, and as what they are handed out."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from app.domain.values import WeightsDtype
from app.gpu.kernels.linear.base import BlockMatrix, Matrix, dense_of, stored_rows
from app.gpu.kernels.linear.encodings import FLOAT8, INT8, Grouped, quantize, require_inputs
from app.model_store.install import BrokenModel
from app.model_store.saved import Config
from app.model_store.tensors import INDEX, SINGLE, shard_of_tensors

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By the names that safetensors and GGUF give them. Safetensors matrices of any other type become float32."""
_TYPES = {
    **FLOATS,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
LANGUAGE, _TEXT = re.compile(r"\blanguage_model\."), re.compile(r"\blanguage_model\.|^lm_head\.")
"""What stands in the names of a language model's tensors where a folder has other models too, and which those are."""
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
    on_gpu: bool = False
    """Whether a GPU computes with tensors that arrive elsewhere."""

    @property
    def place(self) -> torch.device:
        """Where tensors are handed out."""
        return torch.device("meta") if self.on_meta else self.device

    @property
    def keeps_matrices(self) -> bool:
        """Whether matrices are kept as `matrices` says: a GPU, and a CPU in half types, do that with 8 bits alone."""
        return self.matrices in _KINDS or (self.device.type == "cpu" and self.dtype is torch.float32)

    @property
    def multiplies_groups(self) -> bool:
        """Whether a GPU has a kernel for matrices in groups; a CPU that keeps matrices has one."""
        on_gpu = self.on_gpu or self.device.type == "cuda"
        return self.matrices is WeightsDtype.CHECKPOINT and on_gpu and self.dtype.itemsize == 2

    def matrix(self, name: str, stored: Matrix) -> Matrix:
        """The matrix `name` as `matrices` says. Raises FieldOutOfRange for 8 bits if its rows have no whole blocks."""
        grouped = isinstance(stored, BlockMatrix) and isinstance(stored.kind, Grouped)
        if not self.keeps_matrices and not (self.multiplies_groups and grouped):
            return dense_of(stored).to(self.place, self.dtype)
        match self.matrices:
            case WeightsDtype.CHECKPOINT:
                known = isinstance(stored, BlockMatrix) or stored.dtype in FLOATS.values()
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


def require_finite(name: str, tensor: Tensor, origin: Path | None, *, has: str = "values") -> None:
    """Raise BrokenModel if a tensor of floats of two bytes or more, or of exponents alone, has NaN or infinity. The
    error says what it `has`: values or scales. One core checks 5 GB/s. Random weights (no `origin`) are not checked.
    """
    exponents = tensor.dtype is torch.float8_e8m0fnu
    if origin is None or tensor.is_meta or not (exponents or tensor.dtype in FLOATS.values()) or not tensor.numel():
        return
    bounds = torch.aminmax(tensor.float() if exponents else tensor)
    if not torch.stack(bounds).isfinite().all():  # NaN passes through
        told = f"tensor {name!r} in {origin} has {has} that are not finite as {str(tensor.dtype).partition('.')[2]}"
        raise BrokenModel(told, param="model")


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
        """The tensor `name`; `BrokenModel` if it is missing, has another shape, cannot be read or is not finite."""
        stored = dense_of(self._stored(name, shape)).reshape(shape)
        tensor = stored.to(self._format.place, self._format.dtype)
        require_finite(name, tensor, self._origin)
        self.nbytes += tensor.nbytes
        return tensor

    def take_matrix(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """The matrix `name` `[out, in]` of a dense layer or a table, as it is to be kept; raises as `take` does. Of
        several, `[n, out, in]`, the rows are those of all.
        """
        stored = self._stored(name, shape)
        if isinstance(stored, Tensor) and self._format.matrices in _KINDS:  # blocks of 8 bits do not show it
            require_finite(name, stored, self._origin)
        matrix = self._format.matrix(name, stored.flatten(0, -2) if isinstance(stored, Tensor) else stored)
        if isinstance(matrix, Tensor):
            require_finite(name, matrix, self._origin)
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
        """The tensor `name` as it is stored, in memory that no other tensor shares. Raises as `take` does, and for
        scales that are not finite.
        """

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

    def __init__(self, seed: int, config: Config, tensor_format: TensorFormat) -> None:
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

    def __init__(self, folder: Path, tensor_format: TensorFormat, *, of_text: bool = False) -> None:
        """With `of_text` the tensors are those of the language model of a folder that has encoders too, and have the
        names that they have in a folder of their own.
        """
        super().__init__(tensor_format, folder, ())
        self._folder = folder
        self._files: dict[str, Any] = {}
        listed = shard_of_tensors(folder)
        if listed is None:
            if not (folder / SINGLE).exists():
                raise BrokenModel(f"{folder} has neither {SINGLE} nor {INDEX}", param="model")
            listed = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        self._names = {LANGUAGE.sub("", name, 1) if of_text else name: name for name in listed}
        """What is stored, by the names that models ask for."""
        if of_text:
            self._names = {name: stored for name, stored in self._names.items() if _TEXT.search(stored)}
        self._file_of = {name: listed[stored] for name, stored in self._names.items()}
        self._left = set(self._file_of)

    def finish(self, ignored: re.Pattern[str]) -> None:
        """As `WeightSource.finish`. Closes the files."""
        self._files.clear()
        super().finish(ignored)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """On the format's device."""
        tensor = self._read(self._check_off(name))
        self._require_shape(name, tuple(tensor.shape), shape)
        return tensor

    def _shape(self, stored: str) -> tuple[int, ...]:
        return tuple(self._open(self._file_of[stored]).get_slice(self._names[stored]).get_shape())

    def _read(self, stored: str) -> Tensor:
        file = self._open(self._file_of[stored])
        try:
            if self._format.on_meta:
                lazy = file.get_slice(self._names[stored])
                dtype = _TYPES.get(lazy.get_dtype(), torch.float64)
                return torch.empty(lazy.get_shape(), dtype=dtype, device="meta")
            tensor: Tensor = file.get_tensor(self._names[stored])
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


def take_output_weight(source: WeightSource, config: Config, embedding: Matrix) -> Matrix:
    """`lm_head.weight` `[vocab, hidden]`; as in Transformers, the embedding where they are tied and none is stored."""
    if config.tie_word_embeddings and not source.holds("lm_head.weight"):
        return embedding
    rows, hidden = embedding.shape
    return source.take_matrix("lm_head.weight", (rows, hidden))
