"""Gated DeltaNet (Yang et al., arXiv:2412.06464), which mixes tokens in layers of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.kernels.attention.base import Batch
from app.gpu.kernels.folding import convolve, recur
from app.gpu.kernels.folding.base import Convolution, Recurrence
from app.gpu.models.family import Parts
from app.gpu.state.layer_state import aligned

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _state(config: PretrainedConfig, dtype: torch.dtype, first: int) -> tuple[Convolution, Recurrence, int]:
    """What a layer that computes in `dtype` keeps of a sequence from byte `first` on, and where that ends. Raises
    FieldOutOfRange for numbers of heads that make no sense.
    """
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    if heads % key_heads:
        raise FieldOutOfRange(
            f"linear_num_key_heads must divide linear_num_value_heads, {heads}; got {key_heads}", param="model"
        )
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim
    convolution = Convolution(2 * key_heads * keys + heads * values, config.linear_conv_kernel_dim, first)
    begin = first + aligned(convolution.numbers * dtype.itemsize)
    recurrence = Recurrence(heads, key_heads, keys, values, begin, config.rms_norm_eps)
    return convolution, recurrence, begin + recurrence.numbers * torch.float32.itemsize


class GatedDeltaNet:
    """Queries, keys and values go through a short convolution. A matrix of each head then forgets, is corrected towards
    the value at the key, and is read at the query. What is read is normed and gated.
    """

    _by_head = False
    """Whether the checkpoint has all that belongs to a key head together, in two matrices."""

    def __init__(self, parts: Parts, name: str) -> None:
        """`name` is that of the layer. Raises FieldOutOfRange for numbers of heads that make no sense."""
        config, hidden, module = parts.config, parts.config.hidden_size, f"{name}.linear_attn"
        self._convolution, self._recurrence, _ = _state(config, parts.dtype, parts.first_state)
        parts.state_fits.append(self._recurrence.fits)
        channels, heads, values = self._convolution.channels, self._recurrence.heads, self._recurrence.values
        if self._by_head:
            qkvz, ba = f"{module}.in_proj_qkvz", f"{module}.in_proj_ba"
            inputs, gates = {qkvz: [channels + heads * values]}, {ba: [2 * heads]}
            orders = {qkvz: _apart(self._recurrence), ba: _halves(self._recurrence)}
        else:
            inputs = {f"{module}.in_proj_qkv": [channels], f"{module}.in_proj_z": [heads * values]}
            gates, orders = {f"{module}.in_proj_{each}": [heads] for each in "ba"}, {}
        self._input = parts.cut(inputs, hidden, bias=False, orders=orders)
        self._gates = parts.cut(gates, hidden, bias=False, orders=orders)
        take, hold = parts.source.take, parts.bundle.hold
        taps = take(f"{module}.conv1d.weight", (channels, 1, self._convolution.taps))
        self._taps = hold(taps[:, 0].T.contiguous())
        self._rates = hold(take(f"{module}.A_log", (heads,)).float().exp())
        self._time_bias = parts.hold(f"{module}.dt_bias", heads)
        self._norm = parts.hold(f"{module}.norm.weight", values)
        self._output = parts.summed(f"{module}.out_proj", hidden, heads * values, bias=False)

    @staticmethod
    def state_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
        """Of a layer that computes in `dtype`. Raises as the constructor does."""
        _, _, end = _state(config, dtype, 0)
        return end

    @staticmethod
    def state_numbers(config: PretrainedConfig) -> int:
        """Of a layer: inputs of the convolution, then matrices."""
        convolution, recurrence, _ = _state(config, torch.float32, 0)
        return convolution.numbers + recurrence.numbers

    def read_states(self, states: Tensor) -> Tensor:
        """`[rows, numbers]` float32."""
        inputs = self._convolution.read(states, self._norm.tensor.dtype)
        return torch.cat((inputs, self._recurrence.read(states)), dim=1)

    def __call__(self, normed: Tensor, batch: Batch, _kv: Tensor) -> Tensor:
        assert batch.states is not None
        projected, channels = self._input(normed), self._convolution.channels
        given = projected[:, :channels], self._taps.tensor, None
        mixed = convolve(*given, batch.states, batch, self._convolution)
        read = recur(
            mixed,
            self._gates(normed),
            self._rates.tensor,
            self._time_bias.tensor,
            batch.states,
            batch,
            self._recurrence,
            projected[:, channels:],
            self._norm.tensor,
        )
        return self._output(read)


class GroupedDeltaNet(GatedDeltaNet):
    """The same as Qwen3-Next's checkpoints have it."""

    _by_head = True


def _apart(shape: Recurrence) -> Tensor:
    """The order of a projection's outputs in which all queries come first, then keys, values and gates."""
    group = shape.heads // shape.key_heads * shape.values
    sizes = [shape.keys, shape.keys, group, group]
    by_head = torch.arange(shape.key_heads * sum(sizes)).view(shape.key_heads, -1)
    return torch.cat([part.flatten() for part in by_head.split(sizes, dim=1)])


def _halves(shape: Recurrence) -> Tensor:
    """The same of what betas and decays are made of."""
    by_head = torch.arange(2 * shape.heads).view(shape.key_heads, 2, -1)
    return by_head.transpose(0, 1).flatten()
