"""What the NVIDIA driver can run: asked of its own library, which also answers where PyTorch can use no GPU."""

import ctypes
from collections.abc import Callable
from typing import Any

LIBRARY = "libcuda.so.1"


def newest_cuda(load: Callable[[str], Any] = ctypes.CDLL) -> str | None:
    """The newest CUDA version it can run, such as "13.0"; None without a driver.

    `cuDriverGetVersion` of the CUDA driver API gives 1000 x major + 10 x minor.
    """
    number = ctypes.c_int()
    try:
        failed = load(LIBRARY).cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"
