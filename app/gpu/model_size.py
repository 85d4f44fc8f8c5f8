"""How much memory a model's weights need, and whether it is there, said before the first of them is allocated."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from app.errors import FieldOutOfRange
from app.gpu.dtypes import dtype_name
from app.machine.memory import read_host_memory
from app.machine.units import size
from app.model_store.resolve import ResolvedModel


def weight_bytes(model: ResolvedModel, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of all parameters on `device` as `dtype`. On a CPU an output projection that is tied to the embedding is a
    second copy, in the layout in which it is multiplied.
    """
    with torch.device("meta"):
        parameters: int = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(model.config).parameters())
    text = model.config.get_text_config()
    tied = text.vocab_size * text.hidden_size if text.tie_word_embeddings and device.type == "cpu" else 0
    return (parameters + tied) * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Bytes of the device's memory that nobody has."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_host_memory().free_bytes


def check_weights_fit(model: ResolvedModel, needed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `FieldOutOfRange` if `needed` bytes of weights, all of them or the part that is to be on `device`, are more
    than is free there.
    """
    free = free_bytes(device)
    if needed > free:
        raise FieldOutOfRange(
            f"the weights of {model.name} need {size(needed)} as {dtype_name(dtype)}; "
            f"{size(free)} are free on {device}. Llama-like models and GPT-2 do with less: see weights_device",
            param="weights_device",
        )
