"""How fast PyTorch multiplies in each type, as JSON. Arguments: OUTPUTS INPUTS THREADS ROWS...

Few rows are a step of decoding, which reads all weights; many rows are a prompt, which computes.
"""

import json
import sys
import time
from collections.abc import Sequence

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPT_ROWS = 256
WEIGHT_BYTES = 64 << 20
"""As float32: more than the caches hold, as the weights of a model are."""
SECONDS = 0.5
"""The time of each type for each count of rows. One turn always runs to its end."""


def probe(outputs: int, inputs: int, rows: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of one product with weights `[outputs, inputs]`, for each count of `rows`, by type: best of turns."""
    return {name: [_product_s(outputs, inputs, count, dtype) for count in rows] for name, dtype in DTYPES.items()}


def _product_s(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> float:
    copies = max(1, WEIGHT_BYTES // (4 * outputs * inputs)) if rows < PROMPT_ROWS else 1
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(copies)]
    x = torch.randn(rows, inputs).to(dtype)
    torch.nn.functional.linear(x, weights[0])
    best, end = float("inf"), time.perf_counter() + SECONDS
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(x, weight)
        best = min(best, (time.perf_counter() - begin) / copies)
    return best


def main() -> None:
    """Measure as the command line asks, and print the figures."""
    outputs, inputs, threads, *rows = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    with torch.inference_mode():
        json.dump({"seconds": probe(outputs, inputs, rows)}, sys.stdout)


if __name__ == "__main__":
    main()
