"""What the CPU kernels cost beside PyTorch's plain ones, in the shapes of SmolLM2-135M: `python -m benchmarks.kernels`.

Variants take turns inside one process, over tensors larger than the caches, and the table shows the best time of each:
on a machine that others use too, the best of many turns is the figure that repeats.
"""

import argparse
import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.device.hardware import dtype_name
from app.gpu.kernels.attention.base import Attention, AttentionSpec, make_batch
from app.gpu.kernels.attention.cpu import attend_on_cpu
from app.gpu.kernels.cpu.compile import compiled_features
from app.gpu.kernels.cpu.tiles import multiplies_pairs
from app.gpu.kernels.linear import DenseLinear, linear_maker
from app.gpu.kernels.linear.base import BlockMatrix, Linear, MatmulPrecision, Matrix, Weight, dense_of
from loadgen.processes.launch import NO_FLAGS, processor_flags

HIDDEN, INNER, VOCABULARY, LAYERS = 576, 1536, 49152, 30
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
SMALL_VOCABULARY, SMALL_LAYERS = 2048, 1
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bf16", "amx-bf16")
"""Of LLVM's words for instruction sets, those that decide about Djinn's kernels."""
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
"""Bytes of a block of 32 weights."""
LAYER_SHAPES = [(960, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
POOL_LAYERS = 4

Variants = dict[str, Callable[[], object]]


class DenseLayer(Protocol):
    """What is measured of a `Linear`: the product of one matrix."""

    in_features: int

    def __call__(self, x: Tensor) -> Tensor: ...


def measure(variants: Variants, repeats: int) -> dict[str, float]:
    """Best time of each variant in milliseconds; they take turns, after one turn of warm-up."""
    best = dict.fromkeys(variants, float("inf"))
    for turn in range(repeats + 1):
        for name, run in variants.items():
            begin = time.perf_counter()
            run()
            if turn:
                best[name] = min(best[name], (time.perf_counter() - begin) * 1e3)
    return best


def print_row(label: object, cells: list[str]) -> None:
    print(f"{label!s:>12}", *(f"{cell:>23}" for cell in cells), flush=True)


def compare_linears(rows: list[int], repeats: int, *, small: bool) -> None:
    """All linear layers of one step, output projection included, at each count of rows; of a far smaller model if
    `small`.
    """
    layers, vocabulary = (SMALL_LAYERS, SMALL_VOCABULARY) if small else (LAYERS, VOCABULARY)
    shapes = LAYER_SHAPES * layers + [(vocabulary, HIDDEN)]
    stacks: dict[str, list[DenseLayer]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(shape).mul_(0.02).to(dtype) for shape in shapes]
        for name, maker in _linear_makers(dtype).items():
            stacks[f"{dtype_name(dtype)} {name}"] = [maker(weight, None) for weight in weights]
    for kind in ("float32", "bfloat16", "float16", *BLOCK_BYTES):
        stacks[f"float32 ours, {kind}"] = [_ours(_matrix(kind, shape)) for shape in shapes]
    stacks["bfloat16 ours"] = [_ours(_matrix("bfloat16", shape), torch.bfloat16) for shape in shapes]
    print_row("rows", list(stacks))
    for count in rows:
        variants = {name: _step(stack, count, name) for name, stack in stacks.items()}
        print_row(count, [f"{time:.2f}" for time in measure(variants, repeats).values()])


def _linear_makers(dtype: torch.dtype) -> dict[str, Callable[[Tensor, None], DenseLayer]]:
    """The kinds of linear layers that this processor can multiply `dtype` in."""
    makers: dict[str, Callable[[Tensor, None], DenseLayer]] = {"plain": DenseLinear}
    if dtype is torch.float32 or onednn_multiplies(dtype):
        makers |= {"oneDNN stored": StoredLinear, "oneDNN packed": PackedLinear}
    else:
        print(f"oneDNN multiplies no {dtype_name(dtype)} on this processor: left out")
    return makers


def _ours(matrix: Matrix, dtype: torch.dtype = torch.float32) -> Linear:
    """Djinn's layer of a model that computes in `dtype`, with weights of any type; bfloat16 has bfloat16's products
    where the processor has an instruction for them.
    """
    in_bfloat16 = dtype is torch.bfloat16 and multiplies_pairs()
    products = MatmulPrecision.BFLOAT16 if in_bfloat16 else MatmulPrecision.FLOAT32
    return linear_maker(torch.device("cpu"), dtype, batch_invariant=False, products=products)(matrix, None, 1)


def _matrix(kind: str, shape: tuple[int, int]) -> Matrix:
    """Weights of any dtype or kind of blocks; bits of blocks are small numbers, so that no scale is infinite."""
    if kind not in BLOCK_BYTES:
        dtype: torch.dtype = getattr(torch, kind)
        return torch.randn(shape).mul_(0.02).to(dtype)
    row_bytes = shape[1] // 32 * BLOCK_BYTES[kind]
    return BlockMatrix(kind, torch.randint(0, 60, (shape[0], row_bytes), dtype=torch.uint8), shape)


def describe_processor() -> str:
    """The processor's flags, what Djinn's kernels may use of them, and what PyTorch's do."""
    ours = " ".join(feature for feature in FEATURES if feature in compiled_features()) or "none of them"
    theirs = torch.backends.cpu.get_cpu_capability()
    return f"processor: {' '.join(processor_flags()) or NO_FLAGS}; ours compiled for {ours}; PyTorch's for {theirs}"


def _step(stack: list[DenseLayer], rows: int, name: str) -> Callable[[], object]:
    dtype = torch.float32 if name.startswith("float32") else torch.bfloat16
    inputs = {width: torch.randn(rows, width).to(dtype) for width in (HIDDEN, INNER)}
    return lambda: [linear(inputs[linear.in_features]) for linear in stack]


def compare_attention(rows: list[int], context: int, repeats: int) -> None:
    """One layer's attention of decode rows that each see `context` tokens, at each count of rows."""
    for index, count in enumerate(rows):
        variants = _attention_variants(count, context)
        if index == 0:
            print_row("rows", list(variants))
        times = measure(variants, repeats)
        print_row(count, [f"{time / POOL_LAYERS:.2f}" for time in times.values()])


def _attention_variants(rows: int, context: int) -> Variants:
    """Each runs `POOL_LAYERS` layers over the same values: ours from pools of each dtype, PyTorch's from float32."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(rows * blocks).view(rows, blocks).tolist()
    batch = make_batch([(context - 1, 1)] * rows, tables, BLOCK_SIZE, torch.device("cpu"))
    pool = torch.randn(rows * blocks, POOL_LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    query, new = torch.randn(rows, HEADS, HEAD_DIM), torch.randn(rows, KV_HEADS, HEAD_DIM)
    spec = AttentionSpec(scale=HEAD_DIM**-0.5)

    def paged(attention: Attention, pool: Tensor) -> Callable[[], object]:
        new_in_pool = new.to(pool.dtype)
        return lambda: [
            attention(query, new_in_pool, new_in_pool, pool[:, layer], batch, spec) for layer in range(POOL_LAYERS)
        ]

    def gathered(pool: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = pool[batch.block_tables].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[..., :context, :]
        return keys, values

    contiguous = torch.randn(POOL_LAYERS, 2, rows, KV_HEADS, context, HEAD_DIM)
    return {
        "paged float32": paged(attend_on_cpu, pool),
        "paged bfloat16": paged(attend_on_cpu, pool.bfloat16()),
        "paged float16": paged(attend_on_cpu, pool.half()),
        "contiguous SDPA": lambda: [
            F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True) for key, value in contiguous
        ],
        "gather and SDPA": lambda: [
            F.scaled_dot_product_attention(query[:, :, None], *gathered(pool[:, layer]), enable_gqa=True)
            for layer in range(POOL_LAYERS)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", choices=["linear", "attention"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="rows of one step")
    parser.add_argument("--context", type=int, default=1024, help="tokens that each attention row sees")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads that PyTorch uses")
    parser.add_argument("--small", action="store_true", help="linear: one layer and 2,048 tokens, done in seconds")
    parser.add_argument("--repeats", type=int, default=5, help="turns that each variant gets")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"milliseconds, best of {options.repeats}, {options.threads} threads, PyTorch {torch.__version__}")
    print(describe_processor())
    with torch.inference_mode():
        if options.kernel == "linear":
            compare_linears(options.rows, options.repeats, small=options.small)
        else:
            compare_attention(options.rows, options.context, options.repeats)


class StoredLinear:
    """oneDNN on a weight in the layout in which it is stored."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weights = [Weight(each) for each in (dense_of(weight), bias) if each is not None]
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        weight, *bias = (each.tensor for each in self.weights)
        y: Tensor = self._multiply(x, weight, bias[0] if bias else None, "none", [], "")
        return y


class PackedLinear(StoredLinear):
    """The same bits from a weight in oneDNN's blocked layout; there is no other copy of it."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.weights[0].tensor = torch.ops.mkldnn._reorder_linear_weight.default(self.weights[0].tensor)


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN multiplies the half type `dtype` in its blocked layout."""
    if not torch.backends.mkldnn.is_available():
        return False
    match dtype:
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        case _:
            return False


if __name__ == "__main__":
    main()
