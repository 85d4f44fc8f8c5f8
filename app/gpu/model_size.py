"""How much memory a model's weights need, and whether it is there, said before the first of them is allocated."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from app.errors import FieldOutOfRange
from app.machine.memory import read_host_memory
from app.model_store.resolve import ResolvedModel

GIB = 1 << 30


def weight_bytes(model: ResolvedModel, dtype: torch.dtype) -> int:
    """Bytes of all parameters as `dtype`."""
    with torch.device("meta"):
        parameters: int = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(model.config).parameters())
    return parameters * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Bytes of the device's memory that nobody has."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_host_memory().free_bytes


def check_weights_fit(model: ResolvedModel, needed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `FieldOutOfRange` if `needed` bytes of weights are more than is free on `device`."""
    free = free_bytes(device)
    if needed > free:
        raise FieldOutOfRange(
            f"{model.name} has {needed / dtype.itemsize / 1e9:.1f} billion parameters, which take {needed / GIB:.1f} "
            f"GiB as {str(dtype).removeprefix('torch.')}; {free / GIB:.1f} GiB are free on {device}: lower "
            "weights_device, and what is not on the device is streamed through it",
            param="weights_device",
        )
