"""A Llama with the layers that a GPU has for weights of 8 bits, beside Transformers with the same rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from app.domain.values import WeightsDtype
from app.gpu.kernels.linear import linear_maker
from app.gpu.kernels.linear.eight_bits import FLOAT8, INT8, dequantize, quantize
from app.gpu.models.base import LayerStack
from tests.gpu.models.oracle import build_model
from tests.gpu.models.test_weights import assert_agrees_with, config_of, resident, saved

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels take no tensors of a CPU")
KINDS = {WeightsDtype.INT8: INT8, WeightsDtype.FLOAT8: FLOAT8}
TOLERANCE = {WeightsDtype.INT8: 1e-4, WeightsDtype.FLOAT8: 0.03}
"""An input that lies between two numbers of float8 may become either."""


def rounded(kind: str, x: Tensor) -> Tensor:
    return dequantize(kind, quantize(kind, x.flatten(0, -2))).view(x.shape)


def round_inputs(module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (rounded(FLOAT8, inputs[0]),)


def oracle(case: str, matrices: WeightsDtype) -> Any:
    """Transformers' model, whose matrices are rounded, and for float8 the inputs of its linear layers too."""
    model = build_model(config_of(case))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(rounded(KINDS[matrices], parameter.data))
    for module in model.modules() if matrices is WeightsDtype.FLOAT8 else ():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(round_inputs)
    return model


def stack_of(case: str, matrices: WeightsDtype, folder: Path, monkeypatch: pytest.MonkeyPatch) -> LayerStack:
    """The layers of a GPU, in Triton's interpreter."""
    on_cuda = partial(linear_maker, torch.device("cuda"))
    monkeypatch.setattr("app.gpu.weights.bundles.linear_maker", lambda _, *args, **kwargs: on_cuda(*args, **kwargs))
    return resident(replace(saved(case, folder), weights_dtype=matrices))


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "matrices"),
    [
        ("llama", WeightsDtype.INT8),
        pytest.param("llama", WeightsDtype.FLOAT8, marks=pytest.mark.long),
        *(
            pytest.param(case, matrices, marks=pytest.mark.long)
            for case in ("llama-tied-biased-wide-heads", "qwen3")
            for matrices in KINDS
        ),
    ],
)
def test_the_answers_are_those_of_a_model_that_is_rounded_so(
    case: str, matrices: WeightsDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = stack_of(case, matrices, tmp_path, monkeypatch)
    assert_agrees_with(oracle(case, matrices), stack, TOLERANCE[matrices])


@torch.no_grad()
@pytest.mark.parametrize("matrices", KINDS)
def test_the_bytes_are_those_of_8_bits(matrices: WeightsDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sum(parameter.numel() for parameter in build_model(config_of("llama")).parameters())
    stack = stack_of("llama", matrices, tmp_path, monkeypatch)
    assert whole < stack.parameter_bytes < 1.15 * whole
