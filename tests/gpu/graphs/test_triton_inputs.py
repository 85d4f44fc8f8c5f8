"""The kernel that copies a step into the inputs of graphs, against PyTorch's copies: on a GPU, else interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from app.gpu.attention.batch import make_batch
from app.gpu.graphs.decode import DecodeInputs
from app.gpu.graphs.triton_inputs import TILE, fill_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
    batch = make_batch([(context - 1, 1) for context in contexts], tables, 4, DEVICE)
    token_ids = torch.arange(7, 7 + len(contexts), device=DEVICE)
    wanted, found = (DecodeInputs(MOST_ROWS, BLOCKS, torch.device("cpu")) for _ in range(2))
    for inputs in (wanted, found):
        inputs._columns += 90  # of an earlier step
        inputs._contexts += 91
        inputs._tables += 92
    host = make_batch([(context - 1, 1) for context in contexts], tables, 4, torch.device("cpu"))
    wanted.fill(token_ids.cpu(), host, rows)
    columns, listed, tabled = (each.to(DEVICE) for each in (found._columns, found._contexts, found._tables))
    fill_inputs(token_ids, batch, columns, listed, tabled, rows)
    assert torch.equal(columns.cpu(), wanted._columns)
    assert torch.equal(listed.cpu(), wanted._contexts)
    assert torch.equal(tabled.cpu(), wanted._tables)
