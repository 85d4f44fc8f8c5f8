"""What layers fold tokens into: the last inputs of a convolution, and a matrix of each head that decays.

A row's state is `[bytes]` uint8, all layers' behind each other, and is replaced. A CPU takes it in blocks, too. A row
with a draft keeps the state behind each of its last tokens (`Batch.state_blocks`). Rows of one token and rows of many
run in one launch; each is folded token by token, from where it was. So a row's bits depend neither on its company nor
on how its tokens were cut into steps. Sums are float32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.gpu.kernels.attention.base import Batch

Weights = tuple[Tensor, Tensor, Tensor]
"""Of a recurrence: rates `[heads]` float32, the biases of steps `[heads]`, and factors, see `recur`."""
NORM_EPS = 1e-6
"""Added to the squares of a key or a query before it is normed."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal convolution of each channel with its own last `taps` inputs, of which the state has all but the newest:
    `[taps - 1, channels]` of the inputs' type, at byte `first`. `silu`: what follows it.
    """

    channels: int
    taps: int
    first: int
    silu: bool = True

    @property
    def numbers(self) -> int:
        """How many a row's state has of it."""
        return (self.taps - 1) * self.channels

    def read(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        """Its inputs of that type in `states` `[rows, bytes]`, `[rows, numbers]` float32."""
        return states[:, self.first :][:, : self.numbers * dtype.itemsize].view(dtype).float()


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The state of each head is a matrix `[keys, values]` of float32; the first is at byte `first`. Every key head
    serves `heads // key_heads` heads that follow each other. `eps` is that of the norm behind it. `delta`: it is that
    of the gated delta rule, else of Mamba 2's selective scan.
    """

    heads: int
    key_heads: int
    keys: int
    values: int
    first: int
    eps: float
    delta: bool = True

    @property
    def numbers(self) -> int:
        """How many a row's state has of it."""
        return self.heads * self.keys * self.values

    def fits(self, block_bytes: int) -> bool:
        """Whether each matrix lies in at most two of the blocks of a state, and each of its lines in one."""
        line = self.values * torch.float32.itemsize
        return block_bytes % line == 0 and self.first % line == 0 and block_bytes >= self.keys * line

    def read(self, states: Tensor) -> Tensor:
        """Its matrices in `states` `[rows, bytes]`, `[rows, numbers]` float32."""
        return states[:, self.first :][:, : self.numbers * torch.float32.itemsize].view(torch.float32)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, batch: Batch, shape: Convolution) -> Tensor:
    """What the convolution makes of `x` `[tokens, channels]`, rows dense: `[tokens, channels]` float32. `weight` is
    `[taps, channels]`, the newest input's last, `bias` `[channels]`; the batch's states are replaced.
    """
    found: Tensor = _on(x).convolve(x, weight, bias, batch, shape)
    return found


def recur(mixed: Tensor, gates: Tensor, weights: Weights, batch: Batch, shape: Recurrence, z: Tensor) -> Tensor:
    """What heads read, `[tokens, heads * values]`; the batch's states are replaced. `z` is `[tokens, heads * values]`,
    rows dense. A decay is `exp(-rate * step)`, a step `softplus(gate + bias)`.

    The gated delta rule (Yang et al., arXiv:2412.06464, equation 10), then a gated norm: of the type of `z`.
    - mixed: `[tokens, 2 * key_heads * keys + heads * values]` float32: queries, keys and values. It is overwritten.
    - gates: `[tokens, 2 * heads]`: what betas and then steps are made of.
    - factors: `[values]`: what a head reads is normed over its values, multiplied by them and by `silu(z)`.

    The selective scan of Mamba 2 (Dao and Gu, arXiv:2405.21060, equation 2), then a gate: float32.
    - mixed: `[tokens, heads * values + 2 * key_heads * keys]` float32: values, keys (B) and queries (C).
    - gates: `[tokens, heads]`. What is added at the key is multiplied by the step.
    - factors: `[heads]`: the value times this is added to what a head reads (D); the sum is multiplied by `silu(z)`.
    """
    found: Tensor = _on(mixed).recur(mixed, gates, weights, batch, shape, z)
    return found


def _on(x: Tensor) -> Any:
    """Its device's kernels: a GPU needs nothing of Numba, and a CPU nothing of Triton."""
    if x.device.type == "cpu":
        from app.gpu.kernels.folding import cpu

        return cpu
    from app.gpu.kernels.folding import triton_folding

    return triton_folding
