"""How much memory the device has, and the most that PyTorch has held of it."""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """A device's memory, in bytes."""

    def total(self) -> int:
        """All of it, whoever has it."""
        ...

    def free(self) -> int:
        """What nobody has: other processes, and the device's own modules and contexts, count as somebody."""
        ...

    def reset_peak(self) -> None:
        """Begin to look for the most that is held at once."""
        ...

    def peak(self) -> int:
        """The most that has been held at once since `reset_peak`, less what is still held now."""
        ...


class CudaMemory:
    """See `DeviceMemory`. What PyTorch keeps cached goes back to the device before each answer.

    The peak is that of the memory which the allocator has reserved, not of the tensors in it: the difference, what
    rounding and fragments cost, is as little to be had for KV.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """See `DeviceMemory.total`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """See `DeviceMemory.free`."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def reset_peak(self) -> None:
        """See `DeviceMemory.reset_peak`."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """See `DeviceMemory.peak`."""
        most = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        return most - torch.cuda.memory_reserved(self._device)
