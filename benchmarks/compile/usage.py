"""What a compiled kernel takes of a multiprocessor, and how many programs of it fit there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from benchmarks.compile.absent import THREADS_OF_A_WARP

REGISTERS, WARPS, PROGRAMS = 64 * 1024, 64, 32
"""Of a multiprocessor of data centre devices since Ampere (CUDA C++ Programming Guide, "Technical Specifications per
Compute Capability")."""
SHARED_KIB = {80: 164, 90: 228, 100: 228}
RESERVED_BYTES = 1024
"""Of shared memory, for each program."""
REGISTERS_AT_ONCE = 256
"""A warp is given registers in multiples of so many."""


@dataclass(frozen=True, slots=True)
class Usage:
    """`stack_bytes`: what a thread keeps in memory for want of registers, or has in arrays. The instructions are those
    of the text, not of a run: `mma` and `wgmma` on tensor cores, `async_copies` loads that do not pass registers.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int
    mma: int
    wgmma: int
    async_copies: int
    programs: int
    """That a multiprocessor runs at once."""


def usage_of(kernel: Any, capability: int) -> Usage:
    """What Triton's compiled `kernel` takes."""
    registers, stack = _resources(kernel.asm["cubin"])
    text, shared, warps = kernel.asm["ptx"], kernel.metadata.shared, kernel.metadata.num_warps
    return Usage(
        registers,
        stack,
        shared,
        warps,
        mma=len(re.findall(r"\bmma\.sync", text)),
        wgmma=len(re.findall(r"\bwgmma\.mma_async|\btcgen05\.mma", text)),
        async_copies=len(re.findall(r"\bcp\.async\.(?:cg|ca|bulk)", text)),
        programs=programs_at_once(registers, shared, warps, capability),
    )


def programs_at_once(registers: int, shared_bytes: int, warps: int, capability: int) -> int:
    """Programs of so many registers a thread that a multiprocessor runs at once (the CUDA occupancy calculator)."""
    of_a_warp = -(-registers * THREADS_OF_A_WARP // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    by_registers = REGISTERS // of_a_warp // warps
    by_shared = SHARED_KIB[capability] * 1024 // (shared_bytes + RESERVED_BYTES)
    return min(by_registers, by_shared, WARPS // warps, PROGRAMS)


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(binary)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return int(registers), int(stack)
