"""Where a model's weights come from: a safetensors folder, a GGUF file, or a seed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from app.gpu.kernels.linear.matrix import Matrix
from app.gpu.weights.form import Form
from app.gpu.weights.gguf_file import GgufFile
from app.gpu.weights.random_weights import RandomWeights
from app.gpu.weights.safetensors_folder import SafetensorsFolder
from app.model_store.gguf.index import is_indexed
from app.model_store.resolve import ResolvedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """The matrix `name` `[out, in]` of a dense layer or a table, as it is to be kept; raises as `take` does."""
        ...

    def outline(self, name: str, shape: tuple[int, int]) -> Matrix:
        """What `take_matrix` would hand out, on `meta`: neither read nor taken. `BrokenModel` if it is missing."""
        ...

    def finish(self, ignored: re.Pattern[str]) -> None:
        """Say that everything needed was taken; `BrokenModel` if a tensor is left that `ignored` does not match."""
        ...


def weights_of(model: ResolvedModel, device: torch.device, dtype: torch.dtype) -> WeightSource:
    """The weights of `model`, which arrive on `device`: matrices as the model says, if they are multiplied so there,
    all others as `dtype`.
    """
    form = Form(device, dtype, model.weights_dtype)
    if model.folder is None:
        return RandomWeights(model.seed, model.config, form)
    return GgufFile(model.folder, form) if is_indexed(model.folder) else SafetensorsFolder(model.folder, form)


def take_output_weight(source: WeightSource, config: PretrainedConfig, embedding: Matrix) -> Matrix:
    """`lm_head.weight` `[vocab, hidden]`, or the embedding where the two are tied.

    As in Transformers, a stored `lm_head.weight` wins over a config that says the two are tied.
    """
    if config.tie_word_embeddings and not source.holds("lm_head.weight"):
        return embedding
    rows, hidden = embedding.shape
    return source.take_matrix("lm_head.weight", (rows, hidden))
