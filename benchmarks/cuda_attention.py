"""What the CUDA decode attention makes of the memory's bandwidth: `python -m benchmarks.cuda_attention`.

Time is the device's, of a recorded CUDA graph, which has no gaps between kernels, as in serving. It runs over as many
layers as the L2 cache cannot hold. Bytes are the keys and values of the contexts, each counted once; the bandwidth that
they are held against is that of a copy on the same device, bytes read and written.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from triton.testing import do_bench_cudagraph

from app.gpu.kernels.attention.base import Attention, AttentionSpec, make_batch
from app.gpu.kernels.attention.cuda import attend_on_cuda

BLOCK_SIZE = 16
POOL_BYTES = 1 << 30
"""At least so much is read before anything is read again."""
COPY_BYTES = 2 << 30
Run = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """The attention of one model: query heads, key heads, width of a head."""

    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "llama-2-7b": Shape(32, 32, 128),
    "llama-2-13b": Shape(40, 40, 128),
    "llama-3-8b": Shape(32, 8, 128),
    "smollm2-135m": Shape(9, 3, 64),
}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source))


def _seconds(run: Run) -> float:
    return float(do_bench_cudagraph(run, rep=100, return_mode="median")) / 1e3


def attention_seconds(shape: Shape, rows: int, context: int, dtype: torch.dtype, device: torch.device) -> list[float]:
    """Seconds of one layer: paged, paged and batch-invariant, and PyTorch's own over contiguous keys and values."""
    blocks = -(-context // BLOCK_SIZE)
    layer_bytes = 2 * rows * blocks * BLOCK_SIZE * shape.kv_heads * shape.head_dim * dtype.itemsize
    layers = max(2, -(-POOL_BYTES // layer_bytes))
    size = (rows * blocks, layers, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    pool = torch.randn(size, dtype=dtype, device=device)
    tables = torch.randperm(rows * blocks).view(rows, blocks).tolist()
    batch = make_batch([(context - 1, 1)] * rows, tables, BLOCK_SIZE, device)
    fused = torch.randn(rows, shape.heads + 2 * shape.kv_heads, shape.head_dim, dtype=dtype, device=device)
    query, key, value = fused.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
    spec = AttentionSpec(scale=shape.head_dim**-0.5)

    def paged(attention: Attention) -> Run:
        return lambda: [attention(query, key, value, pool[:, layer], batch, spec) for layer in range(layers)]

    contiguous = pool.view(layers, 2, rows, shape.kv_heads, blocks * BLOCK_SIZE, shape.head_dim)

    def dense() -> object:
        one = query[:, :, None]
        return [
            F.scaled_dot_product_attention(one, keys[:, :, :context], values[:, :, :context], enable_gqa=True)
            for keys, values in contiguous
        ]

    runs = (paged(attend_on_cuda), paged(partial(attend_on_cuda, batch_invariant=True)), dense)
    return [_seconds(run) / layers for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, nargs="+", default=list(SHAPES), help="whose heads")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128], help="decode rows of one step")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2048], help="tokens that each row sees")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    device, dtype = torch.device("cuda"), getattr(torch, options.dtype)
    torch.manual_seed(0)
    limit = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}, a copy moves {limit / 1e9:.0f} GB/s")
    print("microseconds of one layer, and the share of that bandwidth that its keys and values take")
    print(f"{'model':>14} {'rows':>5} {'context':>8} {'paged':>16} {'batch-invariant':>16} {'contiguous SDPA':>16}")
    for model in options.model:
        shape = SHAPES[model]
        for context in options.context:
            for rows in options.rows:
                times = attention_seconds(shape, rows, context, dtype, device)
                kv_bytes = 2 * rows * context * shape.kv_heads * shape.head_dim * dtype.itemsize
                cells = [f"{time * 1e6:.1f} ({kv_bytes / time / limit:.0%})" for time in times]
                print(f"{model:>14} {rows:>5} {context:>8}", *(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
