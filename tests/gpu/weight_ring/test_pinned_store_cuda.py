"""Pinned bundles on a CUDA device: what a CPU cannot show."""

from __future__ import annotations

import pytest
import torch

from app.gpu.device.choice import streams_of
from app.gpu.weight_ring.pinned_store import PinnedStore
from tests.gpu.weight_files.bundles import Model, same_bits

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
BUSY_CYCLES = 200_000_000
"""About a tenth of a second."""


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
