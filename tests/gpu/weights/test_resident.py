"""Weights that stay on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from app.gpu.attention.reference import ReferenceAttention
from app.gpu.models import build_stack
from app.gpu.weights.form import Form
from app.gpu.weights.random_weights import RandomWeights
from app.gpu.weights.resident import ResidentText
from app.model_store.resolve import ResolvedModel
from tests.gpu.models.oracle import tiny_config

CPU = torch.device("cpu")


class _Remembering(RandomWeights):
    """Knows what it has given away."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(0, config, Form(CPU, torch.bfloat16))
        self.given: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.given[name] = super().take(name, shape)
        return self.given[name]


@torch.no_grad()
def test_a_tied_output_projection_is_the_embedding_itself_where_weights_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.gpu.linear.onednn_multiplies", lambda dtype: False)  # as on a processor without bfloat16
    config = tiny_config("gpt2")
    source, text = _Remembering(config), ResidentText(CPU, torch.bfloat16, batch_invariant=False)
    stack = build_stack(ResolvedModel("tied", config, None, 0), source, text, ReferenceAttention(), None)
    hidden = torch.randn(2, 48, dtype=torch.bfloat16)
    assert stack.head(hidden).any()
    source.given["transformer.wte.weight"].zero_()
    assert not stack.head(hidden).any()
