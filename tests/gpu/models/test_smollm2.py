"""Greedy tokens of the real model equal Transformers' own, exactly, however Djinn batches them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.gpu.startup.loader import load_engine
from app.model_store.commands import export_model
from app.model_store.resolve import resolve
from app.settings import Settings
from tests.gpu.driving import Driver
from tests.gpu.oracle import greedy_after

pytestmark = [pytest.mark.long, pytest.mark.model, pytest.mark.timeout(300)]
COUNT = 64
PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain to a child why the sky is blue.",
    "List three uses for a paper clip.",
    "Translate into Spanish: I would like a cup of coffee, please.",
    "A train leaves at 9:15 and arrives at 11:40. How long does the journey take?",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "Write a Python function that reverses a string.",
    "Who wrote On the Origin of Species, and when was it published?",
    "Give me a recipe for pancakes with four ingredients. " * 12,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    settings = Settings()
    return export_model(settings.model, settings.cache_dir)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS
    ]


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def new_driver() -> Driver:
    settings = Settings(kv_device="256MiB", dtype="float32", device="cpu")
    model = resolve(settings.model, cache_dir=settings.cache_dir.expanduser())
    return Driver(load_engine(model, settings.engine()))


def test_together_and_again_from_the_prefix_cache(prompts: list[list[int]], oracle: Any) -> None:
    driver = new_driver()

    together = [driver.submit(driver.open(), tokens, COUNT) for tokens in prompts]
    driver.finish(*together)
    found = [driver.tokens(turn) for turn in together]
    assert [len(tokens) for tokens in found] == [COUNT] * len(prompts)
    assert found == [greedy_after(oracle, prompt, tokens) for prompt, tokens in zip(prompts, found, strict=True)]

    warm = driver.submit(driver.open(), prompts[-1], COUNT)
    driver.finish(warm)
    assert driver.tokens(warm) == found[-1]
    assert driver.end(warm).usage.cached_tokens > len(prompts[-1]) - 2 * Settings().block_size
