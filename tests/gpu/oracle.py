"""What Transformers itself generates."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


def rounded(states: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., head_dim]` as KV of `dtype` gives them back: float8 with the least power of two for each head of each
    token that brings it within 448, the largest float8.
    """
    if dtype is not torch.float8_e4m3fn:
        return states.to(dtype).to(states.dtype)
    scales = (states.double().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30).log2().ceil().exp2()
    return ((states.double() / scales).to(dtype).double() * scales).to(states.dtype)


class RoundingCache(DynamicCache):
    """Keys and values as a cache of `dtype` gives them back, from the moment that they are stored."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key, value = (rounded(states, self._dtype) for states in (key_states, value_states))
        return super().update(key, value, *args, **kwargs)


@dataclass(frozen=True)
class RoundingModel:
    """A Transformers model whose caches round."""

    model: Any
    dtype: torch.dtype

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.generate(*args, past_key_values=RoundingCache(self.dtype), **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, past_key_values=RoundingCache(self.dtype), **kwargs)


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that a Transformers model puts after `prompt`, end tokens included like any other."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # it would take tokens equal to the pad token for padding
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def greedy_after(model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """The most likely token after `prompt` and after each beginning of `tokens`, all in one pass.

    They equal `tokens` if, and only if, the model itself generates `tokens` after `prompt`.
    """
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    return chosen
