"""What layers fold tokens into: the last inputs of a convolution, and a matrix of each head that decays.

A row's state is `[bytes]` uint8, all layers' behind each other, and is replaced. A CPU takes it in blocks, too. A row
with a draft keeps the state behind each of its last tokens (`Batch.state_blocks`). Rows of one token and rows of many
run in one launch; each is folded token by token, from where it was. So a row's bits depend neither on its company nor
on how its tokens were cut into steps. Sums are float32.
"""

from typing import Any

from torch import Tensor

from app.gpu.kernels.attention.base import Batch
from app.gpu.kernels.folding.base import Convolution, Recurrence


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: Batch, shape: Convolution
) -> Tensor:
    """What the convolution makes of `x` `[tokens, channels]`, rows dense: `[tokens, channels]` float32. `weight` is
    `[taps, channels]`, the newest input's last, `bias` `[channels]`; `states` `[rows, bytes]` are replaced.
    """
    found: Tensor = _on(x).convolve(x, weight, bias, states, batch, shape)
    return found


def recur(
    mixed: Tensor,
    gates: Tensor,
    rates: Tensor,
    time_bias: Tensor,
    states: Tensor,
    batch: Batch,
    shape: Recurrence,
    z: Tensor,
    norm: Tensor,
) -> Tensor:
    """The gated delta rule (Yang et al., arXiv:2412.06464, equation 10), then a gated norm: `[tokens, heads * values]`
    of the type of `z`.

    mixed: `[tokens, 2 * key_heads * keys + heads * values]` float32: queries, keys and values. It is overwritten.
    gates: `[tokens, 2 * heads]`: what betas and decays are made of; rates: `[heads]` float32, and time_bias: `[heads]`:
    a decay is `exp(-rate * softplus(gate + time_bias))`.
    z: `[tokens, heads * values]`, rows dense; norm: `[values]`: what a head reads is normed over its values, multiplied
    by `norm` and by `silu(z)`.
    """
    found: Tensor = _on(mixed).recur(mixed, gates, rates, time_bias, states, batch, shape, z, norm)
    return found


def scan(
    mixed: Tensor,
    gates: Tensor,
    rates: Tensor,
    time_bias: Tensor,
    skips: Tensor,
    states: Tensor,
    batch: Batch,
    shape: Recurrence,
    z: Tensor,
) -> Tensor:
    """The selective scan of Mamba 2 (Dao and Gu, arXiv:2405.21060, equation 2), then a gate: `[tokens, heads * values]`
    float32.

    mixed: `[tokens, heads * values + 2 * key_heads * keys]` float32: values, keys (B) and queries (C).
    gates: `[tokens, heads]`; rates: `[heads]` float32, and time_bias: `[heads]`: a step is
    `softplus(gate + time_bias)`, what is added at the key is multiplied by it, and a decay is `exp(-rate * step)`.
    skips: `[heads]`: the value times this is added to what a head reads (D).
    z: `[tokens, heads * values]`, rows dense: the sum is multiplied by `silu(z)`.
    """
    found: Tensor = _on(mixed).scan(mixed, gates, rates, time_bias, skips, states, batch, shape, z)
    return found


def _on(x: Tensor) -> Any:
    """Its device's kernels: a GPU needs nothing of Numba, and a CPU nothing of Triton."""
    if x.device.type == "cpu":
        from app.gpu.kernels.folding import cpu

        return cpu
    from app.gpu.kernels.folding import triton_folding

    return triton_folding
