"""The kernel that copies a step into the inputs of graphs, against PyTorch's copies: on a GPU, else interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from app.gpu.attention.batch import make_batch
from app.gpu.graphs.decode import DecodeInputs
from app.gpu.graphs.triton_inputs import TILE, fill_inputs

CPU = torch.device("cpu")
DEVICE = torch.device("cuda") if torch.cuda.is_available() else CPU
MOST_ROWS, BLOCKS = 11, 2 * TILE + 5


@pytest.mark.parametrize(
    ("contexts", "rows"),
    [
        pytest.param([1], 1, id="one row"),
        pytest.param([5, 17, 33], 8, id="with padding"),
        pytest.param([4] * MOST_ROWS, MOST_ROWS, id="all rows"),
        pytest.param([4 * BLOCKS, 2], 4, id="the longest context beside a short one"),
        pytest.param([4 * TILE, 4 * TILE + 1], 2, id="whole tiles, and one block more"),
    ],
)
def test_a_step_and_its_padding_are_where_graphs_look(contexts: list[int], rows: int) -> None:
    tables = [[number + 3 * place for place in range(BLOCKS)] for number, _ in enumerate(contexts)]
    token_ids = torch.arange(7, 7 + len(contexts))
    host, batch = (make_batch([(each - 1, 1) for each in contexts], tables, 4, device) for device in (CPU, DEVICE))
    inputs = DecodeInputs(MOST_ROWS, BLOCKS, CPU)
    ids, wanted = inputs.first(MOST_ROWS)
    columns = (ids, wanted.positions, wanted.slot_blocks, wanted.slot_offsets)
    for number, tensor in enumerate((*columns, wanted.contexts, wanted.block_tables), 90):
        tensor.fill_(number)  # of an earlier step
    found = (
        torch.stack(columns).to(DEVICE),
        wanted.contexts.to(DEVICE, copy=True),
        wanted.block_tables.to(DEVICE, copy=True),
    )
    inputs.fill(token_ids, host, rows)
    fill_inputs(token_ids.to(DEVICE), batch, *found, rows)
    for ours, theirs in zip(found, (torch.stack(columns), wanted.contexts, wanted.block_tables), strict=True):
        assert torch.equal(ours.cpu(), theirs)
