"""Where a model runs, and in what data type: what the settings ask for, of what the machine has."""

from __future__ import annotations

import torch

from app.errors import FieldOutOfRange
from app.gpu.cuda_recorder import CudaRecorder
from app.gpu.graphs import Recorder


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
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def choose_recorder(wanted: bool | None, device: torch.device, *, streamed: bool) -> Recorder | None:
    """None is yes where it can be. Raises FieldOutOfRange for graphs on a device that has none, or of weights that are
    streamed: a graph's operations read the same addresses each time.
    """
    reason = None
    if device.type != "cuda":
        reason = f"the device is {device}, which has no CUDA graphs"
    elif streamed:
        reason = "weights_device does not hold all weights, and those that are streamed have no place of their own"
    if wanted and reason is not None:
        raise FieldOutOfRange(f"cuda_graphs: {reason}", param="cuda_graphs")
    return None if wanted is False or reason is not None else CudaRecorder(device)
