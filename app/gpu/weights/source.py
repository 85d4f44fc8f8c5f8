"""Where a model's weights come from: a safetensors folder, or a seed."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from app.model_store.errors import BrokenModel
from app.model_store.resolve import ResolvedModel

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class WeightSource(Protocol):
    """Hands out tensors by the names that Transformers gives them, one at a time, on one device in one dtype."""

    nbytes: int
    """Bytes of all tensors taken so far."""

    def holds(self, name: str) -> bool:
        """Whether a tensor `name` is stored; a source that makes what it is asked for stores none."""
        ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`; `BrokenModel` if it is missing or has another shape."""
        ...

    def finish(self, ignored: re.Pattern[str]) -> None:
        """Say that everything needed was taken; `BrokenModel` if a tensor is left that `ignored` does not match."""
        ...


class SafetensorsFolder:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` lists, as Transformers saves them.

    Tensors are copies: one that lies in the mapped file keeps all of it mapped, and where somebody truncates a mapped
    file, the next look at it ends the process.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.nbytes = 0
        self._folder = folder
        self._device = device
        self._dtype = dtype
        self._files: dict[str, Any] = {}
        self._left = self._list_tensors()

    def holds(self, name: str) -> bool:
        """See `WeightSource.holds`."""
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightSource.take`. A checkpoint of the bare decoder lacks the leading `model.` or `transformer.`."""
        bare = name.partition(".")[2]
        stored = name if name in self._left else bare
        if stored not in self._left:
            raise BrokenModel(f"{self._folder} has no tensor {name!r}", param="model")
        tensor = self._read(stored, self._left.pop(stored))
        if tuple(tensor.shape) != shape:
            found = tuple(tensor.shape)
            raise BrokenModel(f"tensor {name!r} in {self._folder} is {found}, must be {shape}", param="model")
        tensor = tensor.to(self._dtype, copy=self._device.type == "cpu")
        self.nbytes += tensor.nbytes
        return tensor

    def finish(self, ignored: re.Pattern[str]) -> None:
        """See `WeightSource.finish`. Closes the files."""
        self._files.clear()
        left = sorted(name for name in self._left if not ignored.search(name))
        if left:
            shown = ", ".join(left[:8]) + (", ..." if len(left) > 8 else "")
            raise BrokenModel(
                f"{self._folder} has {len(left)} tensors the model has no use for: {shown}", param="model"
            )

    def _list_tensors(self) -> dict[str, str]:
        """Tensor name to the file that holds it."""
        index = self._folder / _INDEX
        if index.exists():
            try:
                return dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise BrokenModel(f"{index} has no weight_map that can be read: {error!r}", param="model") from error
        if not (self._folder / _SINGLE).exists():
            raise BrokenModel(f"{self._folder} has neither {_SINGLE} nor {_INDEX}", param="model")
        return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self._folder / file, framework="pt", device=str(self._device))
            except (OSError, SafetensorError) as error:
                raise BrokenModel(f"cannot read {self._folder / file}: {error}", param="model") from error
        return self._files[file]

    def _read(self, name: str, file: str) -> Tensor:
        try:
            tensor: Tensor = self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise BrokenModel(f"cannot read {name!r} from {self._folder / file}: {error}", param="model") from error
        return tensor


class RandomWeights:
    """Normal matrices and biases, norms of one. A tensor depends on the seed and its name only, not on the order."""

    def __init__(self, seed: int, config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.nbytes = 0
        self._seed = seed
        self._std: float = getattr(config, "initializer_range", 0.02)
        self._device = device
        self._dtype = dtype

    def holds(self, name: str) -> bool:
        """See `WeightSource.holds`."""
        return False

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightSource.take`. The tensor is made where it will live."""
        tensor = torch.empty(shape, device=self._device, dtype=self._dtype)
        self.nbytes += tensor.nbytes
        if len(shape) == 1 and not name.endswith("bias"):
            return tensor.fill_(1.0)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        # manual_seed takes a signed 64-bit integer.
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return tensor.normal_(0.0, self._std, generator=generator)

    def finish(self, ignored: re.Pattern[str]) -> None:
        """See `WeightSource.finish`: nothing can be left."""


def weights_of(model: ResolvedModel, device: torch.device, dtype: torch.dtype) -> WeightSource:
    """The weights of `model`, which arrive on `device` as `dtype`."""
    if model.folder is None:
        return RandomWeights(model.seed, model.config, device, dtype)
    return SafetensorsFolder(model.folder, device, dtype)


def take_output_weight(source: WeightSource, config: PretrainedConfig, embedding: Tensor) -> Tensor:
    """`lm_head.weight` `[vocab, hidden]`, or the embedding where the two are tied.

    As in Transformers, a stored `lm_head.weight` wins over a config that says the two are tied.
    """
    if config.tie_word_embeddings and not source.holds("lm_head.weight"):
        return embedding
    return source.take("lm_head.weight", tuple(embedding.shape))
