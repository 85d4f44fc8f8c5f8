"""What mixes tokens by folding them into a state: a short convolution, alone, or before a recurrence of matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.points import Point
from app.gpu.kernels.attention.base import Batch
from app.gpu.kernels.folding import Convolution, Recurrence, convolve, recur
from app.gpu.kernels.linear.base import Weight
from app.gpu.models.elementwise import multiply, rms_norm, rounded
from app.gpu.models.parts import Parts
from app.gpu.state.layer_state import aligned
from app.model_store.saved import Config

Kept = tuple[Convolution] | tuple[Convolution, Recurrence]
"""What a layer keeps of a sequence, in this order."""


class Folding(ABC):
    """What mixes tokens in a layer. `decoder_layer` adds norms and the residual stream."""

    @abstractmethod
    def __init__(self, parts: Parts, name: str) -> None:
        """`name` is that of the layer. Raises as `kept`."""

    @staticmethod
    @abstractmethod
    def kept(config: Config, dtype: torch.dtype, first: int) -> Kept:
        """What a layer that computes in `dtype` keeps of a sequence from byte `first` on. Raises FieldOutOfRange for
        numbers of heads that make no sense.
        """

    @abstractmethod
    def _fold(self, normed: Tensor, batch: Batch) -> Tensor:
        """What the layer makes of `normed` and of the batch's states, which are replaced."""

    @classmethod
    def state_bytes(cls, config: Config, dtype: torch.dtype) -> int:
        """Of a row's state in one layer that computes in `dtype`. Raises as `kept`."""
        last = cls.kept(config, dtype, 0)[-1]
        return last.first + last.numbers * (torch.float32 if isinstance(last, Recurrence) else dtype).itemsize

    @classmethod
    def state_numbers(cls, config: Config) -> int:
        """How many numbers that is: inputs of the convolution, then matrices."""
        return sum(each.numbers for each in cls.kept(config, torch.float32, 0))

    def __call__(self, normed: Tensor, batch: Batch, _kv: Tensor) -> Tensor:
        folded = self._fold(normed, batch)
        if batch.taps is not None and Point.STATE in batch.taps.points:
            assert batch.states is not None
            batch.taps.state(self._read_states, batch.states)
        return folded

    def _read_states(self, states: Tensor) -> Tensor:
        """The numbers of all rows' `states` `[rows, bytes]`, `[rows, numbers]` float32."""
        convolution, *recurrence = self._kept
        inputs = convolution.read(states, self._taps.tensor.dtype)
        return torch.cat([inputs, *(each.read(states) for each in recurrence)], dim=1)

    def _hold_convolution(self, parts: Parts, name: str, *, bias: bool) -> None:
        """Its weights, in the order of `convolve`, and where the states of the layer are."""
        self._kept = self.kept(parts.config, parts.dtype, parts.first_state)
        convolution, *recurrence = self._kept
        parts.state_fits.extend(each.fits for each in recurrence)
        taps = parts.source.take(f"{name}.weight", (convolution.channels, 1, convolution.taps))
        self._taps = parts.bundle.hold(taps[:, 0].T.contiguous())
        self._bias = parts.hold(f"{name}.bias", convolution.channels) if bias else None

    def _convolve(self, x: Tensor, batch: Batch) -> Tensor:
        bias = None if self._bias is None else self._bias.tensor
        return convolve(x, self._taps.tensor, bias, batch, self._kept[0])


class ShortConvolution(Folding):
    """With two gates, in layers of LFM2 (Liquid AI, 2025): `output(c * convolved(b * x))`, of which `b`, `c` and `x`
    come out of one projection.
    """

    def __init__(self, parts: Parts, name: str) -> None:
        config, hidden, module = parts.config, parts.config.hidden_size, f"{name}.conv"
        self._input = parts.cut({f"{module}.in_proj": [hidden] * 3}, hidden, bias=config.conv_bias)
        self._hold_convolution(parts, f"{module}.conv", bias=config.conv_bias)
        self._output = parts.part_of_sum(f"{module}.out_proj", hidden, hidden, bias=config.conv_bias)

    @staticmethod
    def kept(config: Config, dtype: torch.dtype, first: int) -> tuple[Convolution]:
        return (Convolution(config.hidden_size, config.conv_L_cache, first, silu=False),)

    def _fold(self, normed: Tensor, batch: Batch) -> Tensor:
        before, after, x = self._input(normed).chunk(3, dim=1)
        return self._output(multiply(self._convolve(multiply(before, x), batch), after))


def _hold_rates(parts: Parts, module: str, heads: int) -> tuple[Weight, Weight]:
    """The rate of each head's decay, float32, and the bias of its steps: see `recur`."""
    return parts.bundle.hold(parts.source.take(f"{module}.A_log", (heads,)).float().exp()), parts.hold(
        f"{module}.dt_bias", heads
    )


class GatedDeltaNet(Folding):
    """Gated DeltaNet (Yang et al., arXiv:2412.06464), in layers of Qwen3.5: queries, keys and values go through a short
    convolution. A matrix of each head then forgets, is corrected towards the value at the key, and is read at the
    query. What is read is normed and gated. Checkpoints of Qwen3-Next have all that belongs to a key head together, in
    two matrices.
    """

    def __init__(self, parts: Parts, name: str) -> None:
        hidden, module = parts.config.hidden_size, f"{name}.linear_attn"
        convolution, self._recurrence = self.kept(parts.config, parts.dtype, parts.first_state)
        self._channels, heads, values = convolution.channels, self._recurrence.heads, self._recurrence.values
        if parts.config.model_type == "qwen3_next":
            qkvz, ba = f"{module}.in_proj_qkvz", f"{module}.in_proj_ba"
            inputs, gates = {qkvz: [self._channels + heads * values]}, {ba: [2 * heads]}
            orders = {qkvz: _apart(self._recurrence), ba: _halves(self._recurrence)}
        else:
            inputs = {f"{module}.in_proj_qkv": [self._channels], f"{module}.in_proj_z": [heads * values]}
            gates, orders = {f"{module}.in_proj_{each}": [heads] for each in "ba"}, {}
        self._input = parts.cut(inputs, hidden, bias=False, orders=orders)
        self._gates = parts.cut(gates, hidden, bias=False, orders=orders)
        self._hold_convolution(parts, f"{module}.conv1d", bias=False)
        self._rates, self._time_bias = _hold_rates(parts, module, heads)
        self._norm = parts.hold(f"{module}.norm.weight", values)
        self._output = parts.part_of_sum(f"{module}.out_proj", hidden, heads * values)

    @staticmethod
    def kept(config: Config, dtype: torch.dtype, first: int) -> tuple[Convolution, Recurrence]:
        heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
        if heads % key_heads:
            raise FieldOutOfRange(
                f"linear_num_key_heads must divide linear_num_value_heads, {heads}; got {key_heads}", param="model"
            )
        keys, values = config.linear_key_head_dim, config.linear_value_head_dim
        convolution = Convolution(2 * key_heads * keys + heads * values, config.linear_conv_kernel_dim, first)
        first += aligned(convolution.numbers * dtype.itemsize)
        return convolution, Recurrence(heads, key_heads, keys, values, first, config.rms_norm_eps, delta=True)

    def _fold(self, normed: Tensor, batch: Batch) -> Tensor:
        projected = self._input(normed)
        mixed, z = self._convolve(projected[:, : self._channels], batch), projected[:, self._channels :]
        weights = self._rates.tensor, self._time_bias.tensor, self._norm.tensor
        return self._output(recur(mixed, self._gates(normed), weights, batch, self._recurrence, z))


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


_Names = tuple[tuple[str, ...], tuple[str, ...], str, str]
"""How a family's config calls what its Mamba 2 reads of it: the numbers of heads, groups, keys, values and taps, then
whether the convolution, the input and the output have a bias, then the epsilon. And what checkpoints call the mixer.
"""
_SIZES = "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"
_BIASES = "mamba_conv_bias", "mamba_proj_bias", "mamba_proj_bias"
_ALONE = ("use_conv_bias", "use_bias", "use_bias"), "layer_norm_epsilon", "mixer"
_NAMES: dict[str, _Names] = {
    "bamba": (_SIZES, _BIASES, "rms_norm_eps", "mamba"),
    "granitemoehybrid": (_SIZES, _BIASES, "rms_norm_eps", "mamba"),
    "falcon_h1": (_SIZES, (*_BIASES[:2], "projectors_bias"), "rms_norm_eps", "mamba"),
    "mamba2": (("num_heads", "n_groups", "state_size", "head_dim", "conv_kernel"), *_ALONE),
    "nemotron_h": (("mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim", "conv_kernel"), *_ALONE),
}
READ = {name for sizes, biases, eps, _ in _NAMES.values() for name in (*sizes, *biases, eps)}
"""Fields that `Mamba2` reads of a family that has them."""


class Mamba2(Folding):
    """Mamba 2 (Dao and Gu, arXiv:2405.21060), in layers of Granite 4, Nemotron-H and others: values, keys (B) and
    queries (C) go through a short convolution. A matrix of each head then decays, takes in the value at the key, and is
    read at the query. What is read is gated, and normed over all heads of a group.
    """

    def __init__(self, parts: Parts, name: str) -> None:
        config, hidden, (_, biases, _, mixer) = parts.config, parts.config.hidden_size, _NAMES[parts.config.model_type]
        module = f"{name}.{mixer}"
        has_bias, enters, leaves = (getattr(config, name) for name in biases)
        convolution, self._recurrence = self.kept(config, parts.dtype, parts.first_state)
        heads, groups = self._recurrence.heads, self._recurrence.key_heads
        self._width = heads * self._recurrence.values
        self._sizes = [self._width, convolution.channels, heads]
        self._input = parts.cut({f"{module}.in_proj": self._sizes}, hidden, bias=enters)
        self._hold_convolution(parts, f"{module}.conv1d", bias=has_bias)
        self._rates, self._time_bias = _hold_rates(parts, module, heads)
        self._skips, hold = parts.hold(f"{module}.D", heads), parts.bundle.hold
        scales = _scales(config, self._recurrence)
        self._scales = None if scales is None else hold(scales.to(self._rates.tensor.device, parts.dtype))
        self._norm = None
        if getattr(config, "mamba_rms_norm", True):
            self._norm = hold(parts.source.take(f"{module}.norm.weight", (self._width,)).view(groups, -1))
        self._output = parts.part_of_sum(f"{module}.out_proj", hidden, self._width, bias=leaves)

    @staticmethod
    def kept(config: Config, dtype: torch.dtype, first: int) -> tuple[Convolution, Recurrence]:
        sizes, _, eps, _ = _NAMES[config.model_type]
        heads, groups, keys, values, taps = (getattr(config, name) for name in sizes)
        if heads % groups:
            raise FieldOutOfRange(f"{sizes[1]} must divide {sizes[0]}, {heads}; got {groups}", param="model")
        convolution = Convolution(heads * values + 2 * groups * keys, taps, first)
        first += aligned(convolution.numbers * dtype.itemsize)
        return convolution, Recurrence(heads, groups, keys, values, first, getattr(config, eps), delta=False)

    def _fold(self, normed: Tensor, batch: Batch) -> Tensor:
        projected = self._input(normed)
        if self._scales is not None:
            projected = multiply(projected, self._scales.tensor)
        z, inputs, gates = torch.split(projected, self._sizes, dim=1)
        weights = self._rates.tensor, self._time_bias.tensor, self._skips.tensor
        read = recur(self._convolve(inputs, batch), gates, weights, batch, self._recurrence, z)
        if self._norm is not None:
            norm = self._norm.tensor
            read = rms_norm(read.view(-1, *norm.shape), norm, self._recurrence.eps).flatten(1)
        return self._output(rounded(read, normed.dtype))


def _scales(config: Config, shape: Recurrence) -> Tensor | None:
    """What Falcon-H1 multiplies gates, values, keys, queries and steps by, in one vector; None: all by 1."""
    factors = [each * getattr(config, "ssm_in_multiplier", 1.0) for each in getattr(config, "ssm_multipliers", [1.0])]
    if set(factors) == {1.0}:
        return None
    width, keys = shape.heads * shape.values, shape.key_heads * shape.keys
    return torch.tensor(factors).repeat_interleave(torch.tensor([width, width, keys, keys, shape.heads]))
