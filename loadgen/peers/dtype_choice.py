"""The data type of servers that are started for a run: all of them get the same one."""

import re
from pathlib import Path

from loadgen.peers.dtypes import ELEMENT_BYTES
from loadgen.peers.vllm import on_cuda

AUTO = "auto"
"""bfloat16 where this machine multiplies it natively, else float32."""
CHOICES = (AUTO, *ELEMENT_BYTES)
"""What a command line can ask for."""

CPUINFO = Path("/proc/cpuinfo")
NATIVE_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}
"""What the kernel calls products of bfloat16: two ways of x86, and ARM's."""


def choose_dtype(asked: str) -> str:
    """`asked`, one of `CHOICES`, unless it is `auto`: then what this machine is fastest in."""
    if asked != AUTO:
        return asked
    return "bfloat16" if on_cuda() or multiplies_bfloat16(_read_cpuinfo()) else "float32"


def multiplies_bfloat16(cpuinfo: str) -> bool:
    """Whether the processor does so natively, by its /proc/cpuinfo.

    On another one a prompt takes ten times as long in bfloat16 as in float32.
    """
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return flags is not None and not NATIVE_BFLOAT16.isdisjoint(flags[1].split())


def _read_cpuinfo() -> str:
    """Empty where the kernel does not tell."""
    try:
        return CPUINFO.read_text()
    except OSError:
        return ""
