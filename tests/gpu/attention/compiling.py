"""Compiles the CUDA kernels for a device that is not there: `python compiling.py COMPUTE_CAPABILITY`.

Prints, for each kernel as our own code launches it, a JSON line of what it takes of a multiprocessor. Run by path and
not as a module, because the package of the tests chooses Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from app.gpu.attention.base import AttentionSpec
from app.gpu.attention.batch import make_batch
from app.gpu.attention.cuda import CudaAttention
from app.gpu.attention.triton_attend import Sequences, attend
from app.gpu.linear import triton_matmul
from app.gpu.linear.triton_matmul import matmul

HEADS, KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
_launch = JITFunction.run


class AbsentDevice:
    """As much of a Triton driver as compiling asks for."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stands in for the launch of a kernel."""
    kernel = _launch(function, *args, grid=grid, warmup=True, **kwargs)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (stack,) = re.findall(r"REG:\d+ STACK:(\d+)", usage)
    found = {"kernel": function.fn.__name__, "shared_bytes": kernel.metadata.shared, "stack_bytes": int(stack)}
    print(json.dumps(found))


def main() -> None:
    driver.set_active(AbsentDevice())
    JITFunction.run = compile_only
    pool = torch.zeros(8, 2, 2, KV_HEADS, 16, HEAD_DIM, dtype=DTYPE)[:, 1]
    fused = torch.zeros(42, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE)
    query, key, value = fused.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    batch = make_batch([(20, 1), (40, 1), (0, 40)], [[0, 1], [2, 3, 4], [5, 6, 7]], 16, torch.device("cpu"))
    spec = AttentionSpec(HEAD_DIM**-0.5, window=30, softcap=50.0)
    CudaAttention()(query, key, value, pool, batch, spec)
    decodes = Sequences(query[:2], batch.block_tables[:2], batch.contexts[:2], length=1)
    attend(decodes, pool, AttentionSpec(HEAD_DIM**-0.5), torch.empty(2, HEADS, HEAD_DIM, dtype=DTYPE), rows=1, splits=4)
    weight = torch.zeros(1000, 4096, dtype=DTYPE)
    for rows in (1, 16, 17):  # one kernel for all: with another a row might have other bits
        matmul(torch.zeros(rows, 4096, dtype=DTYPE), weight, None)
    assert len(triton_matmul._matmul.device_caches[0][0]) == 1


if __name__ == "__main__":
    main()
