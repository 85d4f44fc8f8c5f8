"""What rows are folded into, as layers and their kernels know it."""

from dataclasses import dataclass

import torch
from torch import Tensor

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
    serves `heads // key_heads` heads that follow each other. `eps` is that of the norm behind it.
    """

    heads: int
    key_heads: int
    keys: int
    values: int
    first: int
    eps: float

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
