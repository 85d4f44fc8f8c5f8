"""The processor by the instructions that decide how fast it multiplies: figures from different ones do not compare."""

import os
import re
from pathlib import Path

FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
)
"""Those that count, in the words of Linux: first x86's, then ARM's."""
NO_FLAGS = "no vector flags known"
CPUINFO = Path("/proc/cpuinfo")
MASKS = {"ATEN_CPU_CAPABILITY": "aten", "ONEDNN_MAX_CPU_ISA": "onednn", "NUMBA_CPU_NAME": "numba"}
"""Variables that keep PyTorch, oneDNN and our own kernels from using all instructions there are, in short.
`NUMBA_CPU_FEATURES` goes with the last one."""


def processor_flags() -> tuple[str, ...]:
    """Those of `FLAGS` that this machine's processor has; none where the kernel does not tell. Then one for each of
    `MASKS` that is set, such as `aten_avx2`.
    """
    masked = tuple(f"{name}_{os.environ[mask].lower()}" for mask, name in MASKS.items() if os.environ.get(mask))
    try:
        return flags_in(CPUINFO.read_text("utf-8")) + masked
    except OSError:
        return masked


def flags_in(cpuinfo: str) -> tuple[str, ...]:
    """Those of `FLAGS` that the text of a /proc/cpuinfo names, in the order of `FLAGS`."""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    found = set() if line is None else set(line[1].split())
    return tuple(flag for flag in FLAGS if flag in found)
