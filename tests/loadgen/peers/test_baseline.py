"""The baseline server, as a process of its own with a tiny model, against Transformers itself."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loadgen.peers.base import ServerSettings
from loadgen.peers.registry import TransformersPeer
from loadgen.peers.serving import Served, serving
from loadgen.targets.openai import OpenAIDialect, find_dialect
from tests.hugging_face import byte_tokenizer
from tests.openai.reference import Reference

pytestmark = pytest.mark.long
CONTEXT = 128
VOCABULARY = 300
PROMPTS = ([1, 2, 3], [10, 11, 12, 13, 14, 15, 16], [20, 21])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose every row of logits has a clear best token, so that batching cannot turn one into another."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": CONTEXT}
    config = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.5, **heads, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer(VOCABULARY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        with serving(TransformersPeer(), ServerSettings(model, "float32")) as served:
            yield served


async def complete(http: httpx.AsyncClient, prompt: list[int], tokens: int) -> list[int]:
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    answer = await http.post("/v1/completions", json=body)
    answer.raise_for_status()
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


async def test_prompts_of_unequal_length_in_one_batch_get_what_they_get_alone(served: Served, model: Path) -> None:
    """More than a batch holds wait."""
    lengths = (5, 9, 7)
    reference = Reference(model)
    reference.model.generation_config.eos_token_id = None
    right = [reference.greedy(prompt, tokens) for prompt, tokens in zip(PROMPTS, lengths, strict=True)]
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        asked = (complete(http, prompt, tokens) for prompt, tokens in 7 * [*zip(PROMPTS, lengths, strict=True)])
        assert await asyncio.gather(*asked) == 7 * right


def test_the_stream_says_what_the_whole_answer_says(served: Served) -> None:
    extra = {"ignore_eos": True}
    asked: Any = {"model": "model", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "extra_body": extra}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as sdk:
        whole = sdk.completions.create(**asked)
        chunks = list(sdk.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 12)


async def test_its_tokenizer_is_that_of_the_model_and_the_load_generator_understands_it(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url) as http:
        answer = await http.post("/tokenize", json={"prompt": "Hé", "add_special_tokens": True})
    assert answer.json() == {"tokens": [256, *"Hé".encode()]}
    transport = served.spec.transport()
    dialect = await find_dialect(served.spec, "model", transport)
    await transport.close()
    assert dialect == OpenAIDialect("model", {"return_token_ids": True})
