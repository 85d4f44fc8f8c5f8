"""What an engine does before its first turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from app.gpu.attention.batch import Batch
from app.gpu.models.base import LayerStack
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel
from tests.gpu.wrapping import WrappedStack


class Watched(WrappedStack):
    """Notes the lengths of rows and the size of blocks that its layers see."""

    def __init__(self, stack: LayerStack) -> None:
        super().__init__(stack)
        self.rows: list[int] = []
        self.block_sizes: list[int] = []

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        self.rows += [row.length for row in batch.rows]
        self.block_sizes.append(kv.shape[3])
        return super().layer(index, hidden, batch, kv)


@pytest.mark.usefixtures("one_thread")
def test_what_is_compiled_beforehand_is_what_turns_will_run(tiny_llama: TinyModel) -> None:
    """A token and a prompt, over blocks of the size that was set: kernels may be compiled for it."""
    stack = Watched(tiny_llama.stack)
    replace(tiny_llama, stack=stack).engine()
    assert set(stack.block_sizes) == {BLOCK}
    assert [min(stack.rows), max(stack.rows) > 1] == [1, True]
