"""Tiny models whose decode steps can be recorded: a fixture for test files to import."""

from __future__ import annotations

import pytest
import torch

from app.gpu.attention.base import Attention
from app.gpu.models import load_stack
from tests.gpu.breakpoints.breaking_models import TinyModel, make_tiny
from tests.gpu.graphs.recording import PaddedAttention

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A Llama whose attention takes padding rows."""
    return with_attention(make_tiny("llama", tmp_path_factory.mktemp("llama")), PaddedAttention())


def with_attention(tiny: TinyModel, attention: Attention) -> TinyModel:
    stack = load_stack(tiny.resolved, device=CPU, dtype=torch.float32, attention=attention)
    return TinyModel(tiny.resolved, stack, tiny.oracle)
