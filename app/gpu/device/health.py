"""Whether a device still works after an error.

Some errors of CUDA stay: an illegal address, a failed assertion or a memory error leaves the process's context broken,
and each later call fails with the same error (CUDA runtime API, "sticky" errors). Only another process can go on.
"""

import torch


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
