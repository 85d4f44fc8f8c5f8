"""A tensor's memory as system calls take it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def host_bytes(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor on the host, flat; writing to it writes to the tensor."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
