"""Whether this PyTorch has kernels for this GPU."""

import re
from collections.abc import Sequence

from app.doctor.findings import Finding, error, ok, warning
from app.doctor.probe import GPU

NAME = "compute_capability"
BFLOAT16 = (8, 0)
"""The first compute capability that multiplies bfloat16 in hardware."""


def check_capability(gpu: GPU, architectures: Sequence[str]) -> Finding:
    """`architectures`: what PyTorch is built for."""
    capability = (gpu.major, gpu.minor)
    summary = f"{gpu.major}.{gpu.minor}"
    if not any(_runs_on(architecture, capability) for architecture in architectures):
        return error(
            NAME,
            f"{summary}, for which this PyTorch has no kernels: {', '.join(architectures) or 'it has none at all'}",
            "install a PyTorch that is built for this GPU: https://pytorch.org/get-started/locally/",
        )
    if capability < BFLOAT16:
        return warning(NAME, f"{summary}, which has no bfloat16 in hardware", "serve with --dtype float16")
    return ok(NAME, summary)


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Machine code (`sm_XY`) runs on the same major version from its minor version up, with the suffix `a` on that
    version alone; PTX (`compute_XY`) on anything newer. CUDA C++ Programming Guide, "Binary Compatibility" and
    "PTX Compatibility".
    """
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if parts is None:
        return False
    built = (int(parts[2]), int(parts[3]))
    if parts[4] == "a":
        return built == capability
    if parts[1] == "compute" and not parts[4]:
        return built <= capability
    return built[0] == capability[0] and built <= capability
