"""In which type a CPU multiplies matrices: what is asked for, and what the machine makes of `auto`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from app.domain.errors import FieldOutOfRange
from app.domain.values import WeightsDtype
from app.gpu.linear.base import Products
from app.gpu.startup import products
from app.gpu.startup.products import attends_in_bfloat16, choose_products
from app.model_store.resolve import ResolvedModel, resolve
from app.settings import EngineSettings, Settings
from tests.gpu.driving import Driver
from tests.gpu.oracle import greedy_tokens
from tests.gpu.tiny_engine import make_engine, model, prompt

__all__ = ["model"]
pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


class RoundedLinear(torch.nn.Linear):
    """PyTorch's, of inputs and weights that have been rounded."""

    def forward(self, input: Tensor) -> Tensor:
        rounded = input.bfloat16().float(), self.weight.bfloat16().float()
        return torch.nn.functional.linear(*rounded, self.bias)


@pytest.fixture(scope="module")
def rounding_oracle(model: ResolvedModel) -> Any:
    assert model.folder is not None
    oracle = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
    for module in oracle.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = RoundedLinear
    return oracle


def test_tokens_are_those_of_transformers_with_rounded_products(model: ResolvedModel, rounding_oracle: Any) -> None:
    """Several turns at once, whose prompts take several steps, with and without drafts."""
    for drafts in (0, None):
        driver = Driver(make_engine(model, matmul_precision="bfloat16", max_draft_tokens=drafts))
        turns = [driver.submit(driver.open(), prompt(number, 5 + 9 * number), 12) for number in range(6)]
        driver.finish(*turns)
        for number, turn in enumerate(turns):
            assert driver.tokens(turn) == greedy_tokens(rounding_oracle, prompt(number, 5 + 9 * number), 12)


def test_streamed_weights_give_the_same_tokens(model: ResolvedModel, tmp_path: Path) -> None:
    resident = Driver(make_engine(model, matmul_precision="bfloat16"))
    total = resident.memory().text.total_bytes
    streamed = Driver(make_engine(model, matmul_precision="bfloat16", weights_device=total // 2, weights_dir=tmp_path))
    assert streamed.memory().text.kept_bytes < total
    assert streamed.generate(prompt(3, 20), 10) == resident.generate(prompt(3, 20), 10)
    streamed.engine.close()


def settings_of(**given: Any) -> EngineSettings:
    return Settings(**given).engine()


@pytest.mark.parametrize(
    ("given", "has_instruction", "expected"),
    [
        ({}, True, Products.AS_KEPT),
        ({}, False, Products.FLOAT32),
        ({"dtype": "float32"}, True, Products.FLOAT32),
        ({"matmul_precision": "float32"}, True, Products.FLOAT32),
        ({"matmul_precision": "bfloat16"}, False, Products.BFLOAT16),
        ({"matmul_precision": "bfloat16", "dtype": "float32"}, True, Products.BFLOAT16),
    ],
)
def test_auto_looks_at_the_processor_unless_a_type_is_asked_for(
    given: dict[str, str],
    has_instruction: bool,
    expected: Products,
    model: ResolvedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_has_instruction", lambda: has_instruction)
    assert choose_products(settings_of(**given), model, CPU, torch.float32) is expected


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_bfloat16_is_refused_where_pytorch_multiplies(device: str, dtype: torch.dtype, model: ResolvedModel) -> None:
    asked = settings_of(matmul_precision="bfloat16")
    with pytest.raises(FieldOutOfRange, match="matmul_precision must be auto or float32") as refused:
        choose_products(asked, model, torch.device(device), dtype)
    assert refused.value.param == "matmul_precision"
    assert choose_products(settings_of(), model, torch.device(device), dtype) is Products.FLOAT32


@pytest.mark.parametrize(
    ("multiplied", "checkpoint", "kept", "expected"),
    [
        (Products.FLOAT32, torch.bfloat16, WeightsDtype.CHECKPOINT, False),
        (Products.BFLOAT16, torch.float32, WeightsDtype.CHECKPOINT, True),
        (Products.AS_KEPT, torch.bfloat16, WeightsDtype.CHECKPOINT, True),
        (Products.AS_KEPT, torch.float32, WeightsDtype.CHECKPOINT, False),
        (Products.AS_KEPT, torch.float32, WeightsDtype.BFLOAT16, True),
        (Products.AS_KEPT, torch.bfloat16, WeightsDtype.INT8, False),
    ],
)
def test_prompts_attend_in_bfloat16_where_all_matrices_are_multiplied_in_it(
    multiplied: Products,
    checkpoint: torch.dtype,
    kept: WeightsDtype,
    expected: bool,
    tmp_path: Path,
    model: ResolvedModel,
) -> None:
    assert model.folder is not None
    AutoModelForCausalLM.from_pretrained(model.folder, dtype=checkpoint).save_pretrained(tmp_path)
    found = resolve(str(tmp_path), cache_dir=tmp_path, weights_dtype=kept)
    assert attends_in_bfloat16(found, multiplied) is expected


@pytest.mark.parametrize(
    ("config", "expected"), [({"dtype": "bfloat16"}, True), ({"dtype": "float32"}, False), ({}, False)]
)
def test_a_config_that_was_read_once_says_the_type_in_a_word_or_not_at_all(
    config: dict[str, str], expected: bool, model: ResolvedModel
) -> None:
    saved: Any = SimpleNamespace(**config)
    assert attends_in_bfloat16(replace(model, config=saved), Products.AS_KEPT) is expected
