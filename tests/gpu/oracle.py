"""What Transformers itself generates."""

from __future__ import annotations

from typing import Any

import torch


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
