"""A model on a device whose memory is too short."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from app.gpu.attention.batch import Batch
from app.gpu.models.base import LayerStack
from tests.gpu.wrapping import WrappedStack


def ask_device() -> object:
    """As a GPU refuses it."""
    raise torch.OutOfMemoryError("CUDA out of memory.")


def ask_torch() -> object:
    """Of the host, by PyTorch."""
    return torch.empty(1 << 60, dtype=torch.uint8)


def ask_numpy() -> object:
    """Of the host, by NumPy."""
    return np.empty(1 << 60, np.uint8)


class ShortOfMemory(WrappedStack):
    """Gives up a layer half-way where there is too little memory for it.

    That is with more than `most` tokens at once, from `first_layer` on, or now and then with `chance`. What an attempt
    that failed has left in the slots of its tokens is not to be relied on: they hold NaN.
    """

    def __init__(self, stack: LayerStack) -> None:
        super().__init__(stack)
        self.active = False
        """Not while an engine is put together: that its steps do not fit then would be an error."""
        self.most: int | None = None
        self.first_layer = 0
        self.unfit_context: int | None = None
        """No row with at least so many tokens fits, however few of them are new."""
        self.chance = 0.0
        self.ask: Callable[[], object] = ask_device
        """Asks for memory that there is not."""
        self.failures = 0
        self.sizes: list[int] = []
        """Tokens of each batch that the first layer has run."""
        self._random = random.Random(0)

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        if self.active and index >= self.first_layer and self._fails(batch, len(hidden)):
            self.failures += 1
            kv[batch.slot_blocks, :, :, batch.slot_offsets] = torch.nan
            self.ask()
        if index == 0:
            self.sizes.append(len(hidden))
        return super().layer(index, hidden, batch, kv)

    def _fails(self, batch: Batch, tokens: int) -> bool:
        if self.unfit_context is not None and int(batch.contexts.max()) >= self.unfit_context:
            return True
        if self.most is not None and tokens > self.most:
            return True
        return tokens > 1 and self._random.random() < self.chance
