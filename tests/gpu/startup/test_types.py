"""Which types of matrices, products and KV are taken or refused. Drafts are on only where they change no token."""

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
from app.gpu.device.hardware import choose_kv_dtype
from app.gpu.forward.graphs import layer_by_layer, run_piece
from app.gpu.kernels.attention import attention_for
from app.gpu.kernels.attention.base import make_batch
from app.gpu.kernels.linear.base import MatmulPrecision
from app.gpu.kv.pools import KVPool
from app.gpu.models import load_stack, recipe
from app.gpu.models.base import LayerStack
from app.gpu.models.recipe import (
    attends_in_bfloat16,
    choose_draft_tokens,
    choose_products,
    require_float8,
    require_weights_dtype,
)
from app.gpu.startup.loader import load_engine
from app.model_store.resolve import ResolvedModel, resolve
from app.settings import DRAFT_TOKENS, Settings
from tests.gpu.driving import Driver
from tests.gpu.models.oracle import CASES, build_model, save_model, tiny_config
from tests.gpu.tiny_engine import greedy_tokens, make_engine, model, prompt

__all__ = ["model"]
pytestmark = pytest.mark.usefixtures("one_thread")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LLAMA = ResolvedModel("tiny", tiny_config("llama"), None, 0)


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


@pytest.mark.parametrize(
    ("given", "has_instruction", "expected"),
    [
        ({}, True, MatmulPrecision.AS_KEPT),
        ({}, False, MatmulPrecision.FLOAT32),
        ({"matmul_precision": "bfloat16"}, False, MatmulPrecision.BFLOAT16),
        ({"dtype": "bfloat16"}, True, MatmulPrecision.BFLOAT16),
        ({"dtype": "bfloat16"}, False, MatmulPrecision.FLOAT32),
        ({"dtype": "bfloat16", "matmul_precision": "float32"}, True, MatmulPrecision.FLOAT32),
        ({"dtype": "float16"}, True, MatmulPrecision.FLOAT32),
    ],
)
def test_auto_looks_at_the_processor_unless_a_type_is_asked_for(
    given: dict[str, Any],
    has_instruction: bool,
    expected: MatmulPrecision,
    model: ResolvedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model in bfloat16 is multiplied in it where the processor can."""
    monkeypatch.setattr(recipe, "_is_fast_in_bfloat16", lambda: has_instruction)
    dtype = DTYPES[given.get("dtype", "float32")]
    assert choose_products(Settings(**given).engine(), model, CPU, dtype) is expected


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float16), ("cuda", torch.float32)])
def test_bfloat16_is_refused_beside_another_type(
    device: str, dtype: torch.dtype, model: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "_is_fast_in_bfloat16", lambda: False)
    asked = Settings(matmul_precision="bfloat16").engine()
    with pytest.raises(FieldOutOfRange, match="matmul_precision must be auto or float32") as refused:
        choose_products(asked, model, torch.device(device), dtype)
    assert refused.value.param == "matmul_precision"
    assert choose_products(Settings().engine(), model, torch.device(device), dtype) is MatmulPrecision.FLOAT32


@pytest.mark.parametrize(
    ("multiplied", "stored", "kept", "expected"),
    [
        (MatmulPrecision.FLOAT32, {"dtype": torch.bfloat16}, WeightsDtype.CHECKPOINT, False),
        (MatmulPrecision.BFLOAT16, {"dtype": torch.float32}, WeightsDtype.CHECKPOINT, True),
        (MatmulPrecision.AS_KEPT, {"dtype": torch.bfloat16}, WeightsDtype.CHECKPOINT, True),
        (MatmulPrecision.AS_KEPT, {"dtype": "bfloat16"}, WeightsDtype.CHECKPOINT, True),
        (MatmulPrecision.AS_KEPT, {"dtype": "float32"}, WeightsDtype.CHECKPOINT, False),
        (MatmulPrecision.AS_KEPT, {}, WeightsDtype.CHECKPOINT, False),
        (MatmulPrecision.AS_KEPT, {"dtype": torch.float32}, WeightsDtype.BFLOAT16, True),
        (MatmulPrecision.AS_KEPT, {"dtype": torch.bfloat16}, WeightsDtype.INT8, False),
    ],
)
def test_prompts_attend_in_bfloat16_where_all_matrices_are_multiplied_in_it(
    multiplied: MatmulPrecision, stored: dict[str, Any], kept: WeightsDtype, expected: bool
) -> None:
    """A config that was read once says the type in a word or not at all."""
    config: Any = SimpleNamespace(**stored)
    assert attends_in_bfloat16(replace(LLAMA, config=config, weights_dtype=kept), multiplied) is expected


@pytest.mark.parametrize(
    ("case", "asked", "device", "dtype", "why"),
    [
        ("gpt2", WeightsDtype.CHECKPOINT, CUDA, torch.bfloat16, None),
        ("gpt2", WeightsDtype.INT8, CPU, torch.float32, None),
        ("llama", WeightsDtype.INT8, CUDA, torch.bfloat16, None),
        ("llama", WeightsDtype.INT8, CPU, torch.bfloat16, "cpu multiplies matrices as bfloat16"),
        ("llama", WeightsDtype.BFLOAT16, CUDA, torch.float16, "cuda multiplies matrices as float16"),
        ("gpt2", WeightsDtype.INT8, CUDA, torch.bfloat16, "'gpt2' are stored with their inputs as rows"),
        ("gpt_neox", WeightsDtype.INT8, CUDA, torch.bfloat16, "Transformers' modules"),
        ("llama", WeightsDtype.FLOAT8, CPU, torch.float32, "float8 needs a GPU of compute capability 8.9 or newer"),
    ],
)
def test_a_checkpoint_is_taken_everywhere_and_int8_where_it_is_multiplied(
    case: str, asked: WeightsDtype, device: torch.device, dtype: torch.dtype, why: str | None
) -> None:
    model = replace(LLAMA, config=tiny_config(case), weights_dtype=asked)
    if why is None:
        require_weights_dtype(model, device, dtype)
        return
    with pytest.raises(FieldOutOfRange, match=why) as refused:
        require_weights_dtype(model, device, dtype)
    assert refused.value.param == "weights_dtype"


@pytest.mark.parametrize(
    ("dtype", "capability", "why"),
    [(torch.bfloat16, (8, 6), "8.9 or newer; cuda has 8.6"), (torch.float16, (9, 0), "dtype bfloat16; got float16")],
)
def test_float8_is_taken_by_devices_that_have_it_alone(
    dtype: torch.dtype, capability: tuple[int, int] | None, why: str
) -> None:
    for taken in ((8, 9), (9, 0), (10, 0)):
        require_float8(CUDA, torch.bfloat16, taken)
    with pytest.raises(FieldOutOfRange, match=why):
        require_float8(CUDA, dtype, capability)


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


@pytest.mark.parametrize(("name", "computes"), [("float32", "bfloat16"), ("float16", "bfloat16")])
def test_a_type_that_is_no_smaller_is_refused(name: str, computes: str) -> None:
    with pytest.raises(FieldOutOfRange, match=f"auto, {computes}, or smaller .* got {name}") as refused:
        choose_kv_dtype(name, DTYPES[computes])
    assert refused.value.param == "kv_dtype"


SINGLE, HALF = torch.float32, torch.bfloat16
BLOCK = 4


def make_model(case: str, folder: Path) -> ResolvedModel:
    with torch.no_grad():
        return resolve(str(save_model(build_model(tiny_config(case)), folder)), cache_dir=folder)


def choose(
    model: ResolvedModel, place: torch.device, asked: int | None = None, *, batch_invariant: bool = False
) -> int:
    settings = replace(Settings().engine(), max_draft_tokens=asked, batch_invariant=batch_invariant)
    return choose_draft_tokens(model, settings, place)


def test_a_gpu_drafts_only_when_it_is_told_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Drafts would cost it the overlap of steps and the recorded ones."""
    llama = make_model("llama", tmp_path)
    with caplog.at_level("INFO", logger="app.gpu.models.recipe"):
        assert choose(llama, CUDA, batch_invariant=True) == 0
    assert "max_draft_tokens turns them on" in caplog.text
    assert choose(llama, CUDA, 5, batch_invariant=True) == 5


@pytest.mark.parametrize(
    ("case", "place", "why"),
    [
        ("gpt2-relu", CPU, "the activation of 'gpt2'"),
        ("gpt_neox", CPU, "Transformers' modules"),
        ("llama", CUDA, "matrix products depend on the batch; with batch_invariant"),
    ],
)
def test_drafts_that_could_change_a_token_are_refused(case: str, place: torch.device, why: str, tmp_path: Path) -> None:
    model = make_model(case, tmp_path)
    assert choose(model, place) == choose(model, place, 0) == 0
    with pytest.raises(FieldOutOfRange, match=why) as refused:
        choose(model, place, 4)
    assert refused.value.param == "max_draft_tokens"
    if place == CPU:
        with pytest.raises(FieldOutOfRange, match="max_draft_tokens must be 0"):
            load_engine(model, replace(Settings(device="cpu", state_dir=None).engine(), max_draft_tokens=1))


def logits_of(stack: LayerStack, context: int, length: int, company: int, kv_dtype: torch.dtype) -> Tensor:
    """Logits of the last eight tokens after `context` others: `length` at once, beside rows of others."""
    pool = KVPool(stack, 200, BLOCK, dtype=kv_dtype)
    tokens = torch.tensor(prompt(3, context + 8)) % 60
    tables = [list(range(100)), *([100 + 9 * other + n for n in range(9)] for other in range(company))]

    def run(spans: list[tuple[int, int]], token_ids: Tensor) -> Tensor:
        batch = make_batch(spans, tables[: len(spans)], BLOCK, stack.device)
        return run_piece(stack, layer_by_layer(stack, pool), 0, stack.num_layers + 1, token_ids, batch)

    run([(0, context)], tokens[:context])
    found = []
    for first in range(context, context + 8, length):
        others = [(20, length)] * company
        row = tokens[first : first + length]
        found.append(run([(first, length), *others], torch.cat([row, *[row + 1] * company]) % 60)[:length])
    return torch.cat(found)


FLOAT8 = torch.float8_e4m3fn
ALIKE = [
    ("llama-tied-biased-wide-heads", SINGLE, torch.float16),
    ("mistral-window", SINGLE, HALF),
    ("qwen3", SINGLE, FLOAT8),
    ("smollm3", HALF, HALF),
]


@torch.inference_mode()
@pytest.mark.parametrize(("case", "dtype", "kv_dtype"), ALIKE)
def test_eight_tokens_at_once_have_the_bits_that_each_has_alone(
    case: str, dtype: torch.dtype, kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    """In any company."""
    model = make_model(case, tmp_path)
    assert choose(model, CPU) == DRAFT_TOKENS
    stack = load_stack(model, device=CPU, dtype=dtype, attention=attention_for(CPU))
    for context in (5, 90):
        alone = logits_of(stack, context, 1, 0, kv_dtype)
        for length, company in ((2, 0), (4, 3), (8, 0), (8, 5)):
            assert torch.equal(logits_of(stack, context, length, company, kv_dtype), alone)
