"""Whether a model's weights fit, said before the first of them is allocated."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from app.errors import FieldOutOfRange
from app.machine.memory import read_host_memory
from app.model_store.resolve import ResolvedModel

GIB = 1 << 30


def check_weights_fit(model: ResolvedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `FieldOutOfRange` if the weights are larger than the memory that is free on `device`."""
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(model.config).parameters())
    needed = parameters * dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_host_memory().free_bytes
    if needed > free:
        raise FieldOutOfRange(
            f"{model.name} has {parameters / 1e9:.1f} billion parameters, which take {needed / GIB:.1f} GiB as "
            f"{str(dtype).removeprefix('torch.')}; {free / GIB:.1f} GiB are free on {device}",
            param="model",
        )
