"""Streamed weights on a GPU: the logits of a device that holds all, bit for bit, and copies beside what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.gpu.attention import attention_for
from app.gpu.attention.batch import make_batch
from app.gpu.device.choice import streams_of
from app.gpu.kv_pools.device import KVPool
from app.gpu.programs.run import layer_by_layer
from app.gpu.startup.weights import LoadedModel, load_model
from app.gpu.step.walk import whole_pass
from app.gpu.weight_ring.pinned_store import PinnedStore
from app.settings import Settings
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel
from tests.gpu.weight_files.bundles import Model, same_bits

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
BLOCKS = 64
BUSY_CYCLES = 200_000_000
"""About a tenth of a second."""


@torch.inference_mode()
def logits_of(loaded: LoadedModel, *, lend: bool) -> list[torch.Tensor]:
    """Of a prompt and some tokens after it, while weights are lent and come back."""
    stack, memory, arena = loaded.stack, None, None
    if loaded.streamed is not None:
        block_bytes = KVPool(stack, 1, BLOCK).data.nbytes
        arena, memory = loaded.streamed.share(BLOCKS, block_bytes)
    pool, found, first = KVPool(stack, BLOCKS, BLOCK, memory), [], 0
    for number, length in enumerate([40, 1, 1, 1, 7, 1, 1]):
        batch = make_batch([(first, length)], [list(range(BLOCKS))], BLOCK, stack.device)
        found.append(
            whole_pass(
                stack, layer_by_layer(stack, pool), torch.arange(first, first + length, device=stack.device) % 90, batch
            )
        )
        first += length
        if lend and loaded.streamed is not None and arena is not None:
            for bundle in arena.lendable[:2]:
                (loaded.streamed.text.take_back if number % 2 else loaded.streamed.text.lend)(bundle)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_logits_are_the_same(tiny_mistral: TinyModel, tmp_path: Path, dtype: torch.dtype, share: float) -> None:
    attention = attention_for(CUDA)
    size = tiny_mistral.stack.parameter_bytes * dtype.itemsize // 4
    everything, part = (
        load_model(
            tiny_mistral.resolved,
            Settings(weights_device=budget, cache_dir=tmp_path).engine(),
            CUDA,
            dtype,
            attention,
        )
        for budget in (None, int(size * share))
    )
    assert part.streamed is not None
    try:
        wanted, found = logits_of(everything, lend=False), logits_of(part, lend=True)
        assert all(map(torch.equal, found, wanted))
    finally:
        part.close()


def test_bundles_arrive_beside_compute_and_behind_their_guards() -> None:
    model = Model([[torch.randn(1 << 20)], [torch.randn(1 << 20, device=CUDA)]], [torch.randn(100, 64)])
    streams = streams_of(CUDA)
    store = PinnedStore(model.contents.layouts, model.contents.tables, streams, 1 << 20)
    model.fill(store)
    places = torch.zeros(2, 4 << 20, dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    computed = streams.compute.record()
    store.load(0, places[0], ()).synchronize()
    assert not computed.query()
    behind = store.load(1, places[1], (computed,))
    assert not behind.query()
    behind.synchronize()
    assert computed.query()
    for place, [tensor] in zip(places, model.bundles, strict=True):
        assert same_bits(place.view(torch.float32).cpu(), tensor.cpu())
    rows = store.rows(0, torch.tensor([99, 0, 99]))
    assert rows.is_pinned()
    assert same_bits(rows, model.tables[0][[99, 0, 99]])
    store.close()
