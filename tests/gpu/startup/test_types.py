"""As what matrices are kept and multiplied, and as what KV is kept: what is asked for, and what a machine can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from app.domain.errors import FieldOutOfRange
from app.domain.values import WeightsDtype
from app.gpu.device.choice import choose_kv_dtype
from app.gpu.linear.base import Products
from app.gpu.startup import products
from app.gpu.startup.loader import load_engine
from app.gpu.startup.products import attends_in_bfloat16, choose_products
from app.gpu.startup.weights_dtype import require_float8, require_weights_dtype
from app.model_store.resolve import ResolvedModel, resolve
from app.settings import Settings
from tests.gpu.driving import Driver
from tests.gpu.models.oracle import CASES, tiny_config
from tests.gpu.oracle import greedy_tokens
from tests.gpu.tiny_engine import make_engine, model, prompt

__all__ = ["model"]
pytestmark = pytest.mark.usefixtures("one_thread")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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
    given: dict[str, Any],
    has_instruction: bool,
    expected: Products,
    model: ResolvedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_has_instruction", lambda: has_instruction)
    assert choose_products(Settings(**given).engine(), model, CPU, torch.float32) is expected


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_bfloat16_is_refused_where_pytorch_multiplies(device: str, dtype: torch.dtype, model: ResolvedModel) -> None:
    asked = Settings(matmul_precision="bfloat16").engine()
    with pytest.raises(FieldOutOfRange, match="matmul_precision must be auto or float32") as refused:
        choose_products(asked, model, torch.device(device), dtype)
    assert refused.value.param == "matmul_precision"
    assert choose_products(Settings().engine(), model, torch.device(device), dtype) is Products.FLOAT32


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


def test_a_config_that_was_read_once_says_the_type_in_a_word_or_not_at_all(model: ResolvedModel) -> None:
    for config, expected in (({"dtype": "bfloat16"}, True), ({"dtype": "float32"}, False), ({}, False)):
        saved: Any = SimpleNamespace(**config)
        assert attends_in_bfloat16(replace(model, config=saved), Products.AS_KEPT) is expected


LLAMA = ResolvedModel("tiny", tiny_config("llama"), None, 0)


def model_of(case: str, asked: WeightsDtype) -> ResolvedModel:
    return replace(LLAMA, config=tiny_config(case), weights_dtype=asked)


@pytest.mark.parametrize(
    ("case", "asked", "device", "dtype"),
    [
        ("llama", WeightsDtype.CHECKPOINT, CPU, torch.bfloat16),
        ("gpt2", WeightsDtype.CHECKPOINT, CUDA, torch.bfloat16),
        ("gpt_neox", WeightsDtype.CHECKPOINT, CUDA, torch.float32),
        ("llama", WeightsDtype.INT8, CPU, torch.float32),
        ("gpt2", WeightsDtype.INT8, CPU, torch.float32),
        ("llama", WeightsDtype.INT8, CUDA, torch.bfloat16),
        ("llama", WeightsDtype.INT8, CUDA, torch.float16),
    ],
)
def test_a_checkpoint_is_taken_everywhere_and_int8_where_it_is_multiplied(
    case: str, asked: WeightsDtype, device: torch.device, dtype: torch.dtype
) -> None:
    require_weights_dtype(model_of(case, asked), device, dtype)


@pytest.mark.parametrize(
    ("case", "asked", "device", "dtype", "why"),
    [
        ("llama", WeightsDtype.INT8, CPU, torch.bfloat16, "cpu multiplies matrices as bfloat16"),
        ("llama", WeightsDtype.INT8, CUDA, torch.float32, "cuda multiplies float32 with float32"),
        ("llama", WeightsDtype.BFLOAT16, CUDA, torch.float16, "cuda multiplies matrices as float16"),
        ("gpt2", WeightsDtype.INT8, CUDA, torch.bfloat16, "'gpt2' are stored with their inputs as rows"),
        ("gpt_neox", WeightsDtype.INT8, CUDA, torch.bfloat16, "Transformers' modules"),
        ("llama", WeightsDtype.FLOAT8, CPU, torch.float32, "float8 needs a GPU of compute capability 8.9 or newer"),
    ],
)
def test_what_is_not_multiplied_so_is_refused(
    case: str, asked: WeightsDtype, device: torch.device, dtype: torch.dtype, why: str
) -> None:
    with pytest.raises(FieldOutOfRange, match=why) as refused:
        require_weights_dtype(model_of(case, asked), device, dtype)
    assert refused.value.param == "weights_dtype"


@pytest.mark.parametrize(
    ("dtype", "capability", "why"),
    [
        (torch.bfloat16, (8, 6), "8.9 or newer; cuda has 8.6"),
        (torch.bfloat16, None, "8.9 or newer; cuda"),
        (torch.float16, (9, 0), "dtype bfloat16; got float16"),
    ],
)
def test_float8_is_taken_by_devices_that_have_it_alone(
    dtype: torch.dtype, capability: tuple[int, int] | None, why: str
) -> None:
    for taken in ((8, 9), (9, 0), (10, 0)):
        require_float8(CUDA, torch.bfloat16, taken)
    with pytest.raises(FieldOutOfRange, match=why):
        require_float8(CUDA, dtype, capability)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("computes", DTYPES)
def test_kv_is_kept_as_the_model_computes_or_in_something_smaller(computes: str) -> None:
    dtype = DTYPES[computes]
    assert choose_kv_dtype("auto", dtype) is choose_kv_dtype(computes, dtype) is dtype
    assert choose_kv_dtype("float8", dtype) is torch.float8_e4m3fn
    assert choose_kv_dtype(computes, torch.float32) is dtype


def test_float8_needs_heads_whose_scales_lie_on_whole_words() -> None:
    config = AutoConfig.for_model(**{**CASES["llama"], "head_dim": 6})
    model = replace(resolve("random:tiny-llama", cache_dir=Path()), config=config)
    with pytest.raises(FieldOutOfRange, match="multiple of 4 numbers; this model's have 6") as refused:
        load_engine(model, Settings(device="cpu", kv_dtype="float8", state_dir=None).engine())
    assert refused.value.param == "kv_dtype"


@pytest.mark.parametrize(
    ("name", "computes"),
    [("float32", "bfloat16"), ("float32", "float16"), ("float16", "bfloat16"), ("bfloat16", "float16")],
)
def test_a_type_that_is_no_smaller_is_refused(name: str, computes: str) -> None:
    with pytest.raises(FieldOutOfRange, match=f"auto, {computes}, or smaller .* got {name}") as refused:
        choose_kv_dtype(name, DTYPES[computes])
    assert refused.value.param == "kv_dtype"


def test_it_is_refused_before_weights_are_read() -> None:
    missing = replace(resolve("random:tiny-llama", cache_dir=Path()), folder=Path("/no/such/folder"))
    with pytest.raises(FieldOutOfRange, match="kv_dtype"):
        load_engine(missing, Settings(device="cpu", dtype="bfloat16", kv_dtype="float16", state_dir=None).engine())
