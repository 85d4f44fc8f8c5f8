"""The processor by the instructions that decide how fast it multiplies: figures from different ones do not compare."""

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


def processor_flags() -> tuple[str, ...]:
    """Those of `FLAGS` that this machine's processor has; none where the kernel does not tell."""
    try:
        return flags_in(CPUINFO.read_text("utf-8"))
    except OSError:
        return ()


def flags_in(cpuinfo: str) -> tuple[str, ...]:
    """Those of `FLAGS` that the text of a /proc/cpuinfo names, in the order of `FLAGS`."""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    found = set() if line is None else set(line[1].split())
    return tuple(flag for flag in FLAGS if flag in found)
