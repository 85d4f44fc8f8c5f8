"""Experts that do not fit on the device: `python -m benchmarks.experts`. Some minutes on a CPU.

A mixture of experts decodes with a sixth of its weights' bytes on the device. It reads the experts that its tokens
visit; or, to compare, every layer passes through the ring whole, with all experts. Each way the weights' file is in
the system's memory, or it is kept out of it: then all that is read comes from the disk. The tokens of all runs must be
those of a model that has all weights in memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from app.gpu.kernels.attention.base import make_batch
from app.gpu.kv.pools import KVPool
from app.gpu.models.recipe import Recipe
from app.gpu.startup.weights import LoadedModel, load_model, needed_bytes
from app.gpu.weights.stores import FileLoad
from app.model_store.resolve import resolve
from app.settings import Settings
from benchmarks.page_cache import dropped
from loadgen.options.common import EXIT_FAILED, EXIT_OK

BLOCK, PROMPT, DISTINCT = 16, 16, 251


@contextmanager
def whole_bundles() -> Iterator[None]:
    """Each bundle that is streamed passes through the ring whole in the block."""
    in_place = FileLoad.is_intact
    FileLoad.is_intact = lambda self: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileLoad.is_intact = in_place  # type: ignore[method-assign]


@torch.inference_mode()
def decode(model: LoadedModel, rows: int, count: int) -> tuple[list[list[int]], list[float]]:
    """The greedy tokens of `rows` sequences, `count` of each, and the seconds of each step."""
    stack, blocks = model.stack, -(-(PROMPT + count) // BLOCK)
    pool = KVPool(stack, rows * blocks, BLOCK)
    tables = [range(row * blocks, (row + 1) * blocks) for row in range(rows)]
    prompts = [[(7 * row + 31 * place) % DISTINCT for place in range(PROMPT)] for row in range(rows)]
    given, length, context = torch.tensor(prompts).flatten(), PROMPT, 0
    tokens, seconds = list[list[int]](), list[float]()
    for _ in range(count):
        begin = time.perf_counter()
        batch = make_batch([(context, length)] * rows, tables, BLOCK, stack.device)
        hidden = stack.embed(given, batch.positions)
        for layer in range(stack.num_layers):
            hidden = stack.layer(layer, hidden, batch, pool.layer(layer))
        given = stack.head(hidden[length - 1 :: length]).argmax(1)
        seconds.append(time.perf_counter() - begin)
        tokens.append(given.tolist())
        context, length = context + length, 1
    return tokens, seconds[1:]


def main() -> int:
    """Run it as the command line asks; returns the process's exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks.experts", description=__doc__)
    parser.add_argument("--model", default="random:experts-400m", help="as djinn serve takes it")
    parser.add_argument("--rows", type=int, default=1, help="sequences that decode together, default: 1")
    parser.add_argument("--tokens", type=int, default=24, help="of each, default: 24")
    parser.add_argument("--share", type=float, default=1 / 6, help="of the weights' bytes on the device, default: 1/6")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    with TemporaryDirectory() as folder:
        settings = Settings(device="cpu", dtype="float32", cache_dir=Path(folder))
        resolved = resolve(arguments.model, cache_dir=Path(folder))
        recipe = Recipe.choose(resolved, settings.engine())
        total = needed_bytes(recipe)
        resident = load_model(recipe)
        expected, _ = decode(resident, arguments.rows, arguments.tokens)
        resident.close()
        budget = settings.model_copy(update={"weights_device": int(total * arguments.share)})
        streamed = load_model(Recipe.choose(resolved, budget.engine()))
        decode(streamed, arguments.rows, 2)  # all bundles are proven
        print(f"{resolved.name}: {budget.weights_device:,} of {total:,} bytes fit; {arguments.rows} rows")
        for where, path in (("memory", []), ("disk", list((Path(folder) / "weights").glob("*.safetensors")))):
            rates = list[float]()
            for what, way in (("experts that are visited", nullcontext), ("all experts", whole_bundles)):
                with way(), dropped(path):
                    found, seconds = decode(streamed, arguments.rows, arguments.tokens)
                if found != expected:
                    print(f"{what} from {where}: other tokens than with all weights in memory", file=sys.stderr)
                    return EXIT_FAILED
                rates.append(arguments.rows / median(seconds))
                print(f"from {where}, {what}: {rates[-1]:.2f} tokens/s", flush=True)
            print(f"from {where}: {rates[0] / rates[1]:.1f} times as fast", flush=True)
        streamed.close()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
