"""A tiny model as a GGUF file."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tests.model_store.tiny_gguf import tiny_llama, tiny_tokenizer, write_gguf


@dataclass(frozen=True)
class TinyModel:
    """A model and its tokenizer, and the GGUF file made of them."""

    model: LlamaForCausalLM
    tokenizer: Tokenizer
    gguf: Path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The tiny model that the tests of this folder share; nobody changes its file."""
    tokenizer = tiny_tokenizer()
    model = tiny_llama(tokenizer.get_vocab_size())
    gguf = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(gguf, model, tokenizer)
    return TinyModel(model, tokenizer, gguf)
