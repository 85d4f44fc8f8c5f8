from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.domain.errors import UnknownModel
from app.model_store.byte_tokenizer import MIN_VOCAB_SIZE
from app.model_store.shapes import SHAPE_NAMES, shape_config


@pytest.mark.parametrize(
    ("shape", "published_parameters"),
    [
        ("gpt2", 124_439_808),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("mistral-7b", 7_248_023_552),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_shape_has_the_published_number_of_parameters(shape: str, published_parameters: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(shape))
    assert sum(parameter.numel() for parameter in model.parameters()) == published_parameters


@pytest.mark.parametrize("shape", [name for name in SHAPE_NAMES if name.startswith("tiny-")])
def test_tiny_shape_runs(shape: str) -> None:
    model = AutoModelForCausalLM.from_config(shape_config(shape))
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 512)


@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_byte_tokenizer_fits_every_shape(shape: str) -> None:
    config = shape_config(shape)
    assert config.vocab_size >= MIN_VOCAB_SIZE
    assert config.max_position_embeddings >= 512


def test_unknown_shape_lists_the_right_ones() -> None:
    with pytest.raises(UnknownModel, match=r"'huge'.*gpt2, llama-2-7b.*tiny-gpt2"):
        shape_config("huge")
