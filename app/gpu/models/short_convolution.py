"""The short convolution with two gates that mixes tokens in layers of LFM2 (Liquid AI, 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from app.gpu.kernels.attention.base import Batch
from app.gpu.kernels.folding import convolve
from app.gpu.kernels.folding.base import Convolution
from app.gpu.models.elementwise import multiply
from app.gpu.models.family import Parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ShortConvolution:
    """`output(c * convolved(b * x))`, of which `b`, `c` and `x` come out of one projection. The state has the last
    inputs of the convolution.
    """

    def __init__(self, parts: Parts, name: str) -> None:
        """`name` is that of the layer."""
        config, hidden, module = parts.config, parts.config.hidden_size, f"{name}.conv"
        self._shape = Convolution(hidden, config.conv_L_cache, parts.first_state, silu=False)
        self._input = parts.cut({f"{module}.in_proj": [hidden] * 3}, hidden, bias=config.conv_bias)
        taps = parts.source.take(f"{module}.conv.weight", (hidden, 1, self._shape.taps))
        self._taps = parts.bundle.hold(taps[:, 0].T.contiguous())
        self._bias = parts.hold(f"{module}.conv.bias", hidden) if config.conv_bias else None
        self._output = parts.summed(f"{module}.out_proj", hidden, hidden, bias=config.conv_bias)

    @staticmethod
    def state_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
        """Of a layer that computes in `dtype`."""
        nbytes: int = (config.conv_L_cache - 1) * config.hidden_size * dtype.itemsize
        return nbytes

    @staticmethod
    def state_numbers(config: PretrainedConfig) -> int:
        """Of a layer."""
        numbers: int = (config.conv_L_cache - 1) * config.hidden_size
        return numbers

    def read_states(self, states: Tensor) -> Tensor:
        """`[rows, numbers]` float32."""
        return self._shape.read(states, self._taps.tensor.dtype)

    def __call__(self, normed: Tensor, batch: Batch, _kv: Tensor) -> Tensor:
        assert batch.states is not None
        before, after, x = self._input(normed).chunk(3, dim=1)
        bias = None if self._bias is None else self._bias.tensor
        mixed = convolve(multiply(before, x), self._taps.tensor, bias, batch.states, batch, self._shape)
        return self._output(multiply(mixed, after))
