"""The oracle: Transformers' own model and tokenizer, on the weights that the server runs."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.hugging_face import byte_tokenizer, shape_config

_MODELS: Any = AutoModelForCausalLM
_TOKENIZERS: Any = AutoTokenizer


class Reference:
    """A model folder, read by Transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = _MODELS.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = _TOKENIZERS.from_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        token_ids: list[int] = self.tokenizer(text)["input_ids"]
        return token_ids

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a chat, the assistant's turn opened."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of generated tokens."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The most likely continuation, of at most `count` tokens."""
        with torch.inference_mode():
            given = torch.tensor([prompt])
            found = self.model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        token_ids: list[int] = found[0, len(prompt) :].tolist()
        return token_ids

    def logprobs(self, token_ids: list[int]) -> Tensor:
        """Log-probabilities `[len(token_ids), vocab]`: row i is about token i + 1."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([token_ids])).logits[0]
        return torch.log_softmax(logits, dim=-1)


def save_tiny_model(folder: Path, *, max_model_len: int = 1024, layers: int = 4, may_end: bool = False) -> None:
    """A small Llama of random weights with a byte-level tokenizer, as Transformers saves them.

    Unless it `may_end` its turns like any other model, it ends one only where a grammar allows nothing else, or
    `logit_bias` asks for it: no length is left to chance.
    """
    config = shape_config("tiny-llama")
    config.max_position_embeddings = max_model_len
    config.num_hidden_layers = layers
    config.initializer_range = 0.2  # at the default, all tokens are nearly equally likely
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = _MODELS.from_config(config)
    if not may_end:
        with torch.no_grad():
            _keep_from_ending(model)
    model.save_pretrained(folder)
    byte_tokenizer(config.vocab_size).save_pretrained(folder)


def _keep_from_ending(model: Any) -> None:
    """Give the end tokens logits of about -50, where all others have less than 10 either way.

    The first number of a hidden state is the same for all tokens, no layer changes it, and only end tokens look at it.
    """
    model.model.embed_tokens.weight[:, 0] = 4.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    head, ends = model.lm_head.weight, model.config.eos_token_id
    head[:, 0] = 0.0
    head[ends] = 0.0
    head[ends, 0] = -100.0
