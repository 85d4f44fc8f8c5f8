"""One device's part: `python -m benchmarks.compile.child CAPABILITY main|every|few|usual` prints a JSON line a kernel.

The device is not there: kernels are compiled for it where our own code launches them, and nothing runs. A process of
its own, as Triton knows one device, and compiles nothing where its interpreter has been chosen.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from app.gpu.kernels.attention.base import FLOAT8, AttentionSpec, make_batch
from app.gpu.kernels.attention.cuda import LEAST_ROWS, PROMPT_ROWS, attend, store
from app.gpu.kernels.folding import Convolution, Recurrence
from app.gpu.kernels.folding.triton_folding import convolve, recur
from app.gpu.kernels.linear.encodings import INT8_BLOCK, Codes, Grouped, float8_rows
from app.gpu.kernels.linear.triton_matmul import grouped_matmul, matmul, matvec, round_rows
from app.gpu.models.triton_elementwise import add_rms_norm, fill_inputs, rms_norm, rotate, silu_mul
from app.gpu.sampling.triton_draw import draw
from app.settings import DRAFT_TOKENS

THREADS_OF_A_WARP = 32


class _AbsentDevice:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self._capability, THREADS_OF_A_WARP)

    def get_current_device(self) -> int:
        return self._capability  # a number of its own: Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def absent_device(capability: int, note: Callable[[str, Any], None]) -> Iterator[None]:
    """Within the block, each launch compiles its kernel for compute capability `capability` (90: sm_90) and tells
    `note` the kernel's name and what Triton has compiled. One device per process.
    """
    launch = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        note(function.fn.__name__, launch(function, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(_AbsentDevice(capability))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = launch


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


HEAD_DIMS, GROUPS, BLOCK_SIZES = (64, 80, 96, 128), range(1, 9), (16, 32, 64)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_HEADS, SEQUENCES, PROMPT, INPUTS, OUTPUTS = 2, 3, 64, 4096, 1024
SPLITS = 4
FLOAT8_CAPABILITY = 89
"""Tensor cores multiply float8 from this one on."""
GROUPED = [
    (Codes.INT4, 128, torch.float16, True),
    (Codes.INT8, 64, torch.bfloat16, False),
    (Codes.FLOAT4, 16, torch.bfloat16, False),
    (Codes.FLOAT8, 128, torch.float32, False),
]
"""Kinds of quantized checkpoints: AWQ and GPTQ, integers, NVFP4, float8 in blocks."""
Launch = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """`group`: heads of queries for each head of keys."""

    head_dim: int = 128
    group: int = 4
    block_size: int = 16
    dtype: str = "bfloat16"


def every_shape() -> list[Shape]:
    """All of them: minutes of compiling for each device."""
    return [Shape(*each) for each in product(HEAD_DIMS, GROUPS, BLOCK_SIZES, DTYPES)]


def main_shapes() -> list[Shape]:
    """Each size of head in each type, and for the most common head each group and each block."""
    usual = Shape()
    heads = [Shape(head_dim, dtype=dtype) for head_dim, dtype in product(HEAD_DIMS, DTYPES)]
    groups = [replace(usual, group=group) for group in GROUPS]
    blocks = [replace(usual, block_size=size) for size in BLOCK_SIZES]
    return list(dict.fromkeys((*heads, *groups, *blocks)))


def few_shapes() -> list[Shape]:
    """Each type, and the ends of each other dimension once, for the tests. A record has all main shapes."""
    return [Shape(), Shape(64, 1, 64, "float32"), Shape(80, 8, 16, "float16")]


def launches(shape: Shape) -> Iterator[tuple[str, Launch]]:
    """What is launched in that shape, by the name of what it is for."""
    dtype, heads = DTYPES[shape.dtype], shape.group * KV_HEADS
    pool = torch.zeros(8, 2, 2, KV_HEADS, shape.block_size, shape.head_dim, dtype=dtype)[:, 1]
    # As a model hands them over: parts of one product.
    fused = torch.zeros(PROMPT, heads + 2 * KV_HEADS, shape.head_dim, dtype=dtype)
    query, key, value = fused.split((heads, KV_HEADS, KV_HEADS), dim=1)
    output = torch.empty(PROMPT, heads, shape.head_dim, dtype=dtype)
    tables, slots = torch.zeros(SEQUENCES, 5, dtype=torch.int32), torch.zeros(PROMPT, dtype=torch.int64)
    contexts, starts = torch.ones(SEQUENCES, dtype=torch.int32), torch.zeros(SEQUENCES + 1, dtype=torch.int32)
    plain = AttentionSpec(shape.head_dim**-0.5)
    capped = AttentionSpec(plain.scale, window=30, softcap=50.0)
    table = torch.zeros(8, shape.head_dim, dtype=dtype)

    def decode(pool: Tensor, spec: AttentionSpec, splits: int = 1) -> None:
        rows = query[:SEQUENCES], tables, contexts, None
        attend(*rows, pool, spec, output[:SEQUENCES], rows=LEAST_ROWS, splits=splits)

    def prompts(pool: Tensor, spec: AttentionSpec, splits: int = 1) -> None:
        tall = PROMPT_ROWS if shape.dtype != "float32" else LEAST_ROWS
        attend(query, tables, contexts, starts, pool, spec, output, rows=tall, splits=splits)

    yield "rotate", lambda: rotate(fused[:, : heads + KV_HEADS], table, slots)
    yield "rotate in part", lambda: rotate(fused[:, : heads + KV_HEADS], table[:, : shape.head_dim // 2], slots)
    yield "store", lambda: store(key, value, pool, slots, slots)
    yield "decode", lambda: decode(pool, plain)
    yield "split decode", lambda: decode(pool, plain, SPLITS)
    yield "prompts", lambda: prompts(pool, plain)
    yield "split prompts", lambda: prompts(pool, plain, SPLITS)
    yield "capped window", lambda: decode(pool, capped)
    yield "prompts, capped window", lambda: prompts(pool, capped)
    if shape.dtype == "bfloat16":
        rounded = float8_rows(pool).view(FLOAT8)
        yield "store float8", lambda: store(key, value, rounded, slots, slots)
        yield "float8 decode", lambda: decode(rounded, plain)
        yield "float8 prompts", lambda: prompts(rounded, plain)


def _every(launch: Callable[..., object], kind: Grouped, inputs: list[Tensor], given: tuple[object, ...]) -> object:
    return [launch(kind, each, *given) for each in inputs]


def wide_launches(dtype: str, capability: int) -> Iterator[tuple[str, Launch]]:
    """What is launched over whole rows on a device of that compute capability. One product has to do for every number
    of them: with another kernel a row might have other bits.
    """
    weight = torch.zeros(OUTPUTS, INPUTS, dtype=DTYPES[dtype])
    inputs = [torch.zeros(rows, INPUTS, dtype=weight.dtype) for rows in (1, 16, 17)]
    yield "product", lambda: [matmul(each, weight, None) for each in inputs]
    yield "product of one row", lambda: matvec(inputs[0], weight, None)
    experts = torch.tensor([0, 16, 17], dtype=torch.int32)
    yield "product of experts", lambda: [matmul(each, weight, None, starts=experts) for each in inputs]
    if weight.dtype is not torch.float32:  # which is refused beside them
        numbers, scales = weight.to(torch.int8), torch.zeros(INPUTS // INT8_BLOCK, OUTPUTS, dtype=torch.float16)
        yield "product of int8", lambda: [matmul(each, numbers, None, scales) for each in inputs]
        for codes, group, values, has_zeros in GROUPED:
            kind = Grouped(codes, group, values, values, has_zeros)
            packed = (
                weight.to(torch.int8).view(torch.uint8)[:, : INPUTS // 2 if codes.in_pairs else INPUTS].contiguous()
            )
            factors = torch.zeros(OUTPUTS, INPUTS // group), torch.zeros(OUTPUTS, INPUTS // group, dtype=torch.int8)
            tensors = packed, None, *factors
            yield f"product of {codes} in groups of {group}", partial(_every, grouped_matmul, kind, inputs, tensors)
    if capability >= FLOAT8_CAPABILITY and weight.dtype is torch.bfloat16:
        yield "rounding to float8", lambda: round_rows(inputs[-1])
        float8, ones = weight.to(torch.float8_e4m3fn), torch.ones(OUTPUTS, 1)
        yield "product of float8", lambda: matmul(float8[:17], float8, None, ones, ones[:17], weight.dtype)
    yield "norm", lambda: rms_norm(inputs[-1], weight[0], 1e-5)
    yield "add and norm", lambda: add_rms_norm(inputs[-1], inputs[-1], weight[0], 1e-5)
    yield "silu and product", lambda: silu_mul(inputs[-1])
    yield from (*folding_launches(weight, None), *folding_launches(weight, torch.zeros(2, 1 + DRAFT_TOKENS, 1).long()))
    if weight.dtype is torch.float32:  # once: numbers of tokens and blocks have no other type, nor have probabilities
        batch, columns = make_batch([(3, 1)], [[0]], 16, weight.device), torch.zeros(4, 8, dtype=torch.int64)
        given, tables = batch.positions, torch.zeros(8, 4, dtype=torch.int32)
        yield "inputs of graphs", lambda: fill_inputs(given, batch, columns, batch.contexts, tables, 8)
        column = torch.zeros(1, 1)
        uniforms, limits = column.double(), (column.long(), column, column)
        yield "draw", lambda: draw(weight[:1], uniforms)
        yield "limited draw", lambda: draw(weight[:1], uniforms, *limits)


def folding_launches(weight: Tensor, kept: Tensor | None) -> Iterator[tuple[str, Launch]]:
    """Those of layers that fold, of the type of `weight`, in Qwen3.5's shape. `kept`: where states of drafts are."""
    heads, keys, drafts = 2, 128, "" if kept is None else ", drafts"
    convolution = Convolution(4 * heads * keys // 2, 4, 0)
    recurrence = Recurrence(heads, heads // 2, keys, keys, 4 * convolution.channels * 4, 1e-6)
    batch = replace(make_batch([(0, 1), (0, 3)], [[0], [0]], 16, weight.device), state_blocks=kept)
    batch = replace(batch, states=torch.zeros(2, recurrence.first + heads * keys * keys * 4, dtype=torch.uint8))
    x, taps = weight[:4, : convolution.channels], weight[:4, : convolution.channels].contiguous()
    mixed, floats = torch.zeros(4, convolution.channels), torch.zeros(heads)
    yield f"short convolution{drafts}", lambda: convolve(x, taps, None, batch, convolution)
    bias, z, scan = weight[0, :heads].contiguous(), weight[:4, : heads * keys], replace(recurrence, delta=False)
    ruled, scanned = (floats, bias, weight[0, :keys]), (floats, bias, bias)
    yield f"gated delta rule{drafts}", lambda: recur(mixed, x[:, : 2 * heads], ruled, batch, recurrence, z)
    yield f"scan of Mamba 2{drafts}", lambda: recur(mixed, x[:, :heads], scanned, batch, scan, z)


SHAPES: dict[str, Callable[[], list[Shape]]] = {
    "main": main_shapes,
    "every": every_shape,
    "few": few_shapes,
    "usual": lambda: [Shape()],
}


def rows(capability: int, shapes: list[Shape]) -> Iterator[dict[str, Any]]:
    """A row for each kernel in each shape, with what it is launched for."""
    compiled: dict[tuple[str, int], Any] = {}

    def note(name: str, kernel: Any) -> None:
        compiled[name, id(kernel)] = kernel

    with absent_device(capability, note):
        for shape, purpose, launch in _all_launches(shapes, capability):
            compiled.clear()
            launch()
            for (name, _), kernel in compiled.items():
                usage = asdict(usage_of(kernel, capability))
                yield {"capability": capability, "purpose": purpose, "kernel": name, **asdict(shape), **usage}


def _all_launches(shapes: list[Shape], capability: int) -> Iterator[tuple[Shape, str, Callable[[], object]]]:
    for shape in shapes:
        yield from ((shape, purpose, launch) for purpose, launch in launches(shape))
    for dtype in dict.fromkeys((*(shape.dtype for shape in shapes), "float32")):  # which takes most memory
        yield from ((Shape(dtype=dtype), purpose, launch) for purpose, launch in wide_launches(dtype, capability))


if __name__ == "__main__":
    for row in rows(int(sys.argv[1]), SHAPES[sys.argv[2]]()):
        print(json.dumps(row), flush=True)
