"""Where a model runs, in what data type, and with which streams: the settings ask, the machine decides."""

import torch

from app.domain.errors import FieldOutOfRange
from app.domain.values import AUTO_DTYPES
from app.gpu.device.cuda import CudaStreams
from app.gpu.device.streams import CpuStreams, DeviceStreams


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
    name = AUTO_DTYPES[device.type] if name == "auto" else name
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def streams_of(device: torch.device) -> DeviceStreams:
    """The streams of `device`."""
    if device.type == "cpu":
        return CpuStreams()

    return CudaStreams(device)
