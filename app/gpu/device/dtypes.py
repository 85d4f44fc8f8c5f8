"""Types of elements by their names."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """As it is written outside of PyTorch: "bfloat16", "float8"."""
    return str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")
