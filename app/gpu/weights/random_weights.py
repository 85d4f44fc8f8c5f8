"""Weights from a seed."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from app.gpu.kernels.linear.matrix import Matrix
from app.gpu.weights.form import Form, nbytes_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class RandomWeights:
    """Normal matrices and biases, norms of one. A tensor depends on the seed and its name only, not on the order."""

    def __init__(self, seed: int, config: PretrainedConfig, form: Form) -> None:
        self.nbytes = 0
        self._seed = seed
        self._std: float = getattr(config, "initializer_range", 0.02)
        self._form = form

    def holds(self, name: str) -> bool:
        """See `WeightSource.holds`."""
        return False

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightSource.take`. The tensor is made where it will live."""
        tensor = self._make(name, shape)
        self.nbytes += tensor.nbytes
        return tensor

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.take_matrix`: the values of `take`, rounded."""
        if not self._form.keeps_matrices:
            return self.take(name, shape)
        matrix = self._form.matrix(name, self._make(name, shape))
        self.nbytes += nbytes_of(matrix)
        return matrix

    def outline(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.outline`."""
        return self._form.outline(name, torch.empty(shape, dtype=self._form.dtype, device="meta"))

    def finish(self, ignored: re.Pattern[str]) -> None:
        """See `WeightSource.finish`: nothing can be left."""

    def _make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, device=self._form.device, dtype=self._form.dtype)
        if len(shape) == 1 and not name.endswith("bias"):
            return tensor.fill_(1.0)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        # manual_seed takes a signed 64-bit integer.
        generator = torch.Generator(self._form.device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return tensor.normal_(0.0, self._std, generator=generator)
