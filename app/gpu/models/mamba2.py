"""The mixer of Mamba 2 (Dao and Gu, arXiv:2405.21060), in layers of Granite 4, Nemotron-H and others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.kernels.attention.base import Batch
from app.gpu.kernels.folding import convolve, scan
from app.gpu.kernels.folding.base import Convolution, Recurrence
from app.gpu.models.elementwise import multiply, rms_norm, rounded
from app.gpu.models.family import Parts
from app.gpu.state.layer_state import aligned

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class _Fields(NamedTuple):
    """How a family's config calls what the mixer reads of it."""

    heads: str = "mamba_n_heads"
    groups: str = "mamba_n_groups"
    keys: str = "mamba_d_state"
    values: str = "mamba_d_head"
    taps: str = "mamba_d_conv"
    convolution_bias: str = "mamba_conv_bias"
    input_bias: str = "mamba_proj_bias"
    output_bias: str = "mamba_proj_bias"
    eps: str = "rms_norm_eps"
    module: str = "mamba"
    """What its checkpoints call the mixer."""


_ALONE = "use_conv_bias", "use_bias", "use_bias", "layer_norm_epsilon", "mixer"
_FIELDS = {
    "falcon_h1": _Fields(output_bias="projectors_bias"),
    "mamba2": _Fields("num_heads", "n_groups", "state_size", "head_dim", "conv_kernel", *_ALONE),
    "nemotron_h": _Fields("mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim", "conv_kernel", *_ALONE),
}
"""Those of families that do not call them as Bamba and Granite do."""
READ = {name for fields in (_Fields(), *_FIELDS.values()) for name in fields[:-1]}
"""Fields that the mixer reads of a family that has them."""


def _fields(config: PretrainedConfig) -> _Fields:
    return _FIELDS.get(config.model_type, _Fields())


def _state(config: PretrainedConfig, dtype: torch.dtype, first: int) -> tuple[Convolution, Recurrence, int]:
    """What a layer that computes in `dtype` keeps of a sequence from byte `first` on, and where that ends. Raises
    FieldOutOfRange for numbers of heads that make no sense.
    """
    names = _fields(config)
    heads, groups, keys, values, taps = (getattr(config, name) for name in names[:5])
    if heads % groups:
        raise FieldOutOfRange(f"{names.groups} must divide {names.heads}, {heads}; got {groups}", param="model")
    convolution = Convolution(heads * values + 2 * groups * keys, taps, first)
    begin = first + aligned(convolution.numbers * dtype.itemsize)
    recurrence = Recurrence(heads, groups, keys, values, begin, getattr(config, names.eps))
    return convolution, recurrence, begin + recurrence.numbers * torch.float32.itemsize


class Mamba2:
    """Values, keys (B) and queries (C) go through a short convolution. A matrix of each head then decays, takes in the
    value at the key, and is read at the query. What is read is gated, and normed over all heads of a group.
    """

    def __init__(self, parts: Parts, name: str) -> None:
        """`name` is that of the layer. Raises FieldOutOfRange for numbers of heads that make no sense."""
        config, hidden, names = parts.config, parts.config.hidden_size, _fields(parts.config)
        module = f"{name}.{names.module}"
        has_bias, enters, leaves = (getattr(config, name) for name in names[5:8])
        self._convolution, self._recurrence, _ = _state(config, parts.dtype, parts.first_state)
        parts.state_fits.append(self._recurrence.fits)
        heads, groups, channels = self._recurrence.heads, self._recurrence.key_heads, self._convolution.channels
        self._width = heads * self._recurrence.values
        sizes = [self._width, channels, heads]
        self._input = parts.cut({f"{module}.in_proj": sizes}, hidden, bias=enters)
        take, hold = parts.source.take, parts.bundle.hold
        taps = take(f"{module}.conv1d.weight", (channels, 1, self._convolution.taps))
        self._taps = hold(taps[:, 0].T.contiguous())
        self._bias = parts.hold(f"{module}.conv1d.bias", channels) if has_bias else None
        self._rates = hold(take(f"{module}.A_log", (heads,)).float().exp())
        self._time_bias, self._skips = (parts.hold(f"{module}.{each}", heads) for each in ("dt_bias", "D"))
        scales = _scales(config, self._recurrence)
        self._scales = None if scales is None else hold(scales.to(self._rates.tensor.device, parts.dtype))
        self._norm = None
        if getattr(config, "mamba_rms_norm", True):
            self._norm = hold(take(f"{module}.norm.weight", (self._width,)).view(groups, -1))
        self._output = parts.summed(f"{module}.out_proj", hidden, self._width, bias=leaves)

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
        inputs = self._convolution.read(states, self._taps.tensor.dtype)
        return torch.cat((inputs, self._recurrence.read(states)), dim=1)

    def __call__(self, normed: Tensor, batch: Batch, _kv: Tensor) -> Tensor:
        assert batch.states is not None
        projected = self._input(normed)
        if self._scales is not None:
            projected = multiply(projected, self._scales.tensor)
        sizes = [self._width, self._convolution.channels, self._recurrence.heads]
        z, inputs, gates = torch.split(projected, sizes, dim=1)
        bias = None if self._bias is None else self._bias.tensor
        mixed = convolve(inputs, self._taps.tensor, bias, batch.states, batch, self._convolution)
        weights = self._rates.tensor, self._time_bias.tensor, self._skips.tensor
        read = scan(mixed, gates, *weights, batch.states, batch, self._recurrence, z)
        if self._norm is not None:
            norm = self._norm.tensor
            read = rms_norm(read.view(-1, *norm.shape), norm, self._recurrence.eps).flatten(1)
        return self._output(rounded(read, normed.dtype))


def _scales(config: PretrainedConfig, shape: Recurrence) -> Tensor | None:
    """What Falcon-H1 multiplies gates, values, keys, queries and steps by, in one vector; None: all by 1."""
    factors = [each * getattr(config, "ssm_in_multiplier", 1.0) for each in getattr(config, "ssm_multipliers", [1.0])]
    if set(factors) == {1.0}:
        return None
    width, keys = shape.heads * shape.values, shape.key_heads * shape.keys
    return torch.tensor(factors).repeat_interleave(torch.tensor([width, width, keys, keys, shape.heads]))
