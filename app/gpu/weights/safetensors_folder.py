"""Weights in a Transformers folder."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from app.gpu.kernels.linear.matrix import Matrix
from app.gpu.weights.form import Form, nbytes_of
from app.model_store.errors import BrokenModel
from app.model_store.shards import INDEX, SINGLE, shard_of_tensors

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By safetensors' names. Matrices of any other type become float32."""


class SafetensorsFolder:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` lists, as Transformers saves them.

    Tensors are copies: one that lies in the mapped file keeps all of it mapped, and where somebody truncates a mapped
    file, the next look at it ends the process.
    """

    def __init__(self, folder: Path, form: Form) -> None:
        self.nbytes = 0
        self._folder = folder
        self._form = form
        self._files: dict[str, Any] = {}
        self._left = self._list_tensors()

    def holds(self, name: str) -> bool:
        """See `WeightSource.holds`."""
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightSource.take`. A checkpoint of the bare decoder lacks the leading `model.` or `transformer.`."""
        stored = self._take_stored(name, shape)
        tensor = stored.to(self._form.dtype, copy=self._form.device.type == "cpu")
        self.nbytes += tensor.nbytes
        return tensor

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.take_matrix`."""
        if not self._form.keeps_matrices:
            return self.take(name, shape)
        matrix = self._form.matrix(name, self._take_stored(name, shape).clone())
        self.nbytes += nbytes_of(matrix)
        return matrix

    def outline(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.outline`."""
        stored = self._name_of(name)
        try:
            dtype = _DTYPES.get(self._open(self._left[stored]).get_slice(stored).get_dtype(), torch.float64)
        except SafetensorError as error:
            raise BrokenModel(f"cannot read {stored!r} from {self._folder}: {error}", param="model") from error
        return self._form.outline(name, torch.empty(shape, dtype=dtype, device="meta"))

    def finish(self, ignored: re.Pattern[str]) -> None:
        """See `WeightSource.finish`. Closes the files."""
        self._files.clear()
        left = sorted(name for name in self._left if not ignored.search(name))
        if left:
            shown = ", ".join(left[:8]) + (", ..." if len(left) > 8 else "")
            raise BrokenModel(
                f"{self._folder} has {len(left)} tensors the model has no use for: {shown}", param="model"
            )

    def _take_stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As it is stored; on the host it may lie in the mapped file."""
        stored = self._name_of(name)
        tensor = self._read(stored, self._left.pop(stored))
        if tuple(tensor.shape) != shape:
            found = tuple(tensor.shape)
            raise BrokenModel(f"tensor {name!r} in {self._folder} is {found}, must be {shape}", param="model")
        return tensor

    def _name_of(self, name: str) -> str:
        """In the file."""
        bare = name.partition(".")[2]
        stored = name if name in self._left else bare
        if stored not in self._left:
            raise BrokenModel(f"{self._folder} has no tensor {name!r}", param="model")
        return stored

    def _list_tensors(self) -> dict[str, str]:
        """Tensor name to the file that holds it."""
        listed = shard_of_tensors(self._folder)
        if listed is not None:
            return listed
        if not (self._folder / SINGLE).exists():
            raise BrokenModel(f"{self._folder} has neither {SINGLE} nor {INDEX}", param="model")
        return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self._folder / file, framework="pt", device=str(self._form.device))
            except (OSError, SafetensorError) as error:
                raise BrokenModel(f"cannot read {self._folder / file}: {error}", param="model") from error
        return self._files[file]

    def _read(self, name: str, file: str) -> Tensor:
        try:
            tensor: Tensor = self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise BrokenModel(f"cannot read {name!r} from {self._folder / file}: {error}", param="model") from error
        return tensor
