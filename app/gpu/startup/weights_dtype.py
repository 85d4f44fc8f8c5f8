"""As what a device multiplies the matrices of a model."""

import torch

from app.domain.errors import FieldOutOfRange
from app.domain.values import WeightsDtype
from app.gpu.device.choice import dtype_name
from app.gpu.models import can_be_streamed, multiplies_blocks
from app.model_store.resolve import ResolvedModel

FLOAT8_CAPABILITY = (8, 9)
"""Devices have instructions for float8 from this one on."""


def require_weights_dtype(model: ResolvedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Raise FieldOutOfRange unless matrices are multiplied as the model's `weights_dtype` by layers that compute in
    `dtype` on `device`.
    """
    asked = model.weights_dtype
    if asked in (WeightsDtype.CHECKPOINT, dtype_name(dtype)):
        return
    if asked is WeightsDtype.FLOAT8:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        require_float8(device, dtype, capability)
    if not can_be_streamed(model):
        why = f"{model.config.model_type!r} runs on Transformers' modules, which multiply as {dtype_name(dtype)}"
    elif device.type == "cpu" and dtype is torch.float32:
        return
    elif device.type == "cpu" or asked not in (WeightsDtype.INT8, WeightsDtype.FLOAT8):
        why = f"{device} multiplies matrices as {dtype_name(dtype)}"
    elif dtype is torch.float32:
        why = f"{device} multiplies float32 with float32"
    elif not multiplies_blocks(model):
        why = f"the matrices of {model.config.model_type!r} are stored with their inputs as rows"
    else:
        return
    raise FieldOutOfRange(
        f"weights_dtype must be checkpoint or {dtype_name(dtype)}; got {asked}: {why}", param="weights_dtype"
    )


def require_float8(device: torch.device, dtype: torch.dtype, capability: tuple[int, int] | None) -> None:
    """Raise FieldOutOfRange unless a device of that compute capability, None for a CPU, multiplies float8 for layers
    that compute in `dtype`. PyTorch scales rows on every such device for results in bfloat16.
    """
    least = ".".join(map(str, FLOAT8_CAPABILITY))
    if capability is None or capability < FLOAT8_CAPABILITY:
        found = device if capability is None else f"{device} has {'.'.join(map(str, capability))}"
        why = f"a GPU of compute capability {least} or newer; {found}"
    elif dtype is not torch.bfloat16:
        why = f"dtype bfloat16; got {dtype_name(dtype)}"
    else:
        return
    raise FieldOutOfRange(f"weights_dtype: float8 needs {why}", param="weights_dtype")
