"""On which device a model runs, in what data type, and whether that device still works after an error.

Some errors of CUDA stay: an illegal address, a failed assertion or a memory error leaves the process's context broken,
and each later call fails with the same error (CUDA runtime API, "sticky" errors). Only another process can go on.
"""

import torch

from app.domain.errors import FieldOutOfRange
from app.domain.values import AUTO_DTYPES

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {**_DTYPES, "float8": torch.float8_e4m3fn}


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a CUDA device. Raises FieldOutOfRange for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise FieldOutOfRange(f"device is {name!r}; use auto, cpu, cuda or cuda:N", param="device") from None
    known = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count())
    if not known:
        count = torch.cuda.device_count()
        raise FieldOutOfRange(f"device is {name!r}; this machine has cpu and {count} CUDA devices", param="device")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on CPU and bfloat16 on CUDA."""
    return _DTYPES[AUTO_DTYPES[device.type] if name == "auto" else name]


def choose_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are kept as under a model that computes in `dtype`; `auto` is the same. Raises
    FieldOutOfRange for a type that is no smaller.
    """
    kept = dtype if name == "auto" else _KV_DTYPES[name]
    if kept is dtype or kept.itemsize < dtype.itemsize:
        return kept
    computes = dtype_name(dtype)
    raise FieldOutOfRange(
        f"kv_dtype must be auto, {computes}, or smaller than {computes}, in which the model computes; got {name}",
        param="kv_dtype",
    )


def dtype_name(dtype: torch.dtype) -> str:
    """As it is written outside of PyTorch: "bfloat16", "float8"."""
    return str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")


class DeviceLost(RuntimeError):
    """The device answers no more in this process."""


def check_alive(device: torch.device, error: Exception) -> None:
    """Raise DeviceLost if `error` is the device's and a trivial computation fails too."""
    if not isinstance(error, torch.AcceleratorError):
        return
    try:
        probe(device)
    except RuntimeError as still:
        raise DeviceLost(f"{device} has failed and does not recover: {still}") from error


def probe(device: torch.device) -> None:
    """Compute something, and wait for it."""
    torch.ones(1, device=device).add_(1).item()
