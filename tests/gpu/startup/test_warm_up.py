"""What runs before clients come, so that none waits for kernels to be compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.gpu.startup.running import warm_up
from tests.gpu.breakpoints.breaking_models import TinyModel


def test_a_row_that_is_alone_runs_too(torch_gpt2: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA has a product of its own for it."""
    rows, head = list[int](), torch_gpt2.stack.head

    def counted(hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(torch_gpt2.stack, "head", counted)
    warm_up(torch_gpt2.stack, 4, torch.float32)
    assert 1 in rows
    assert max(rows) > 1
