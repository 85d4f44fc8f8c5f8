"""Where drafts change no token, and that they change none there: the bits of eight tokens at once and one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.attention import attention_for
from app.gpu.attention.batch import make_batch
from app.gpu.kv_pools.device import KVPool
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.programs.run import layer_by_layer
from app.gpu.startup.drafts import choose_draft_tokens
from app.gpu.startup.loader import load_engine
from app.gpu.step.walk import whole_pass
from app.model_store.resolve import ResolvedModel, resolve
from app.settings import DRAFT_TOKENS, Settings
from tests.gpu.breakpoints.breaking_models import prompt
from tests.gpu.models.oracle import build_model, save_model, tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SINGLE, HALF = torch.float32, torch.bfloat16
BLOCK = 4
Place = tuple[torch.device, torch.dtype]


def make_model(case: str, folder: Path) -> ResolvedModel:
    with torch.no_grad():
        return resolve(str(save_model(build_model(tiny_config(case)), folder)), cache_dir=folder)


def choose(model: ResolvedModel, place: Place, asked: int | None = None, *, batch_invariant: bool = False) -> int:
    settings = replace(Settings().engine(), max_draft_tokens=asked, batch_invariant=batch_invariant)
    return choose_draft_tokens(model, settings, *place)


def test_drafts_are_on_where_they_change_nothing(tmp_path: Path) -> None:
    llama = make_model("llama", tmp_path)
    assert choose(llama, (CPU, SINGLE)) == DRAFT_TOKENS
    assert choose(llama, (CPU, HALF)) == 0
    assert choose(llama, (CPU, HALF), batch_invariant=True) == DRAFT_TOKENS
    assert choose(llama, (CPU, SINGLE), 3) == 3
    assert choose(llama, (CPU, SINGLE), 0) == 0


def test_a_gpu_drafts_only_when_it_is_told_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Drafts would cost it the overlap of steps and the recorded ones."""
    llama = make_model("llama", tmp_path)
    with caplog.at_level("INFO", logger="app.gpu.startup.drafts"):
        assert choose(llama, (CUDA, HALF), batch_invariant=True) == 0
    assert "max_draft_tokens turns them on" in caplog.text
    assert choose(llama, (CUDA, HALF), 5, batch_invariant=True) == 5


@pytest.mark.parametrize(
    ("case", "place", "why"),
    [
        ("gpt2-relu", (CPU, SINGLE), "the activation of 'gpt2'"),
        ("gpt_neox", (CPU, SINGLE), "Transformers' modules"),
        ("llama", (CPU, HALF), "matrix products depend on the batch; with batch_invariant"),
        ("llama", (CUDA, HALF), "matrix products depend on the batch; with batch_invariant"),
    ],
)
def test_drafts_that_could_change_a_token_are_refused(case: str, place: Place, why: str, tmp_path: Path) -> None:
    model = make_model(case, tmp_path)
    assert choose(model, place) == choose(model, place, 0) == 0
    with pytest.raises(FieldOutOfRange, match=why) as refused:
        choose(model, place, 4)
    assert refused.value.param == "max_draft_tokens"
    if place == (CPU, SINGLE):
        with pytest.raises(FieldOutOfRange, match="max_draft_tokens must be 0"):
            load_engine(model, replace(Settings(device="cpu", state_dir=None).engine(), max_draft_tokens=1))


def logits_of(stack: LayerStack, context: int, length: int, company: int, kv_dtype: torch.dtype) -> Tensor:
    """Logits of the last eight tokens after `context` others: `length` at once, beside rows of others."""
    pool = KVPool(stack, 200, BLOCK, dtype=kv_dtype)
    tokens = torch.tensor(prompt(3, context + 8))
    tables = [list(range(100)), *([100 + 9 * other + n for n in range(9)] for other in range(company))]

    def run(spans: list[tuple[int, int]], token_ids: Tensor) -> Tensor:
        batch = make_batch(spans, tables[: len(spans)], BLOCK, stack.device)
        return whole_pass(stack, layer_by_layer(stack, pool), token_ids, batch)

    run([(0, context)], tokens[:context])
    found = []
    for first in range(context, context + 8, length):
        others = [(20, length)] * company
        row = tokens[first : first + length]
        found.append(run([(first, length), *others], torch.cat([row, *[row + 1] * company]) % 60)[:length])
    return torch.cat(found)


FLOAT8 = torch.float8_e4m3fn
ALIKE = [
    ("llama", SINGLE, torch.float16),
    ("llama-tied-biased-wide-heads", SINGLE, SINGLE),
    ("mistral-window", SINGLE, HALF),
    ("qwen2", HALF, HALF),
    ("qwen3", SINGLE, FLOAT8),
    ("smollm3", HALF, HALF),
]


@torch.inference_mode()
@pytest.mark.parametrize(("case", "dtype", "kv_dtype"), ALIKE)
def test_eight_tokens_at_once_have_the_bits_that_each_has_alone(
    case: str, dtype: torch.dtype, kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    """Up to the logits, in any company. In half types only with `batch_invariant`."""
    model, batch_invariant = make_model(case, tmp_path), dtype is HALF
    assert choose(model, (CPU, dtype), batch_invariant=batch_invariant) == DRAFT_TOKENS
    attention = attention_for(CPU, batch_invariant=batch_invariant)
    stack = load_stack(model, device=CPU, dtype=dtype, attention=attention, batch_invariant=batch_invariant)
    for context in (5, 90):
        alone = logits_of(stack, context, 1, 0, kv_dtype)
        for length, company in ((2, 0), (4, 3), (8, 0), (8, 5)):
            assert torch.equal(logits_of(stack, context, length, company, kv_dtype), alone)
