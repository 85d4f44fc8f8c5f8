"""Running a planned step: one walk up the layers, segment by segment."""

from __future__ import annotations

import torch
from torch import Tensor

from app.gpu.batch import make_batch
from app.gpu.kv_pool import KVPool
from app.gpu.models.base import LayerStack
from app.gpu.scheduler import StepPlan
from app.gpu.segments import Row, Segment, cut_segments


class Runner:
    """Owns the model and the KV pool's tensor. Called from the engine thread, in inference mode."""

    def __init__(self, stack: LayerStack, pool: KVPool) -> None:
        self.stack = stack
        self.pool = pool

    def run(self, plan: StepPlan) -> Tensor:
        """Compute every row's layers; the plan's block copies have been made.

        Returns float32 logits `[outputs, vocab_size]`: for each row in order, those of its last `row.outputs` tokens.
        """
        hidden = self._embed(plan.rows)
        for segment in cut_segments(plan.rows):
            self._run_segment(segment, plan.rows, hidden)
        outputs = _output_index(plan.rows, hidden.device)
        return self.stack.head(hidden[outputs]) if len(outputs) else hidden.new_empty(0, self.stack.vocab_size)

    def _embed(self, rows: list[Row]) -> Tensor:
        """Residual stream of all rows packed, `[tokens, hidden_size]`, as layer 0 reads it."""
        token_ids = [t for row in rows for t in row.sequence.tokens[row.first : row.first + row.length]]
        positions = [p for row in rows for p in range(row.first, row.first + row.length)]
        device = self.stack.device
        return self.stack.embed(torch.tensor(token_ids, device=device), torch.tensor(positions, device=device))

    def _run_segment(self, segment: Segment, rows: list[Row], hidden: Tensor) -> None:
        """Take the segment's rows through its layers; `hidden` is updated in place."""
        members = [rows[index] for index in segment.rows]
        batch = make_batch(
            [(row.first, row.length) for row in members],
            [row.sequence.blocks for row in members],
            self.pool.block_size,
            self.stack.device,
        )
        index = None if len(members) == len(rows) else _token_index(rows, segment, hidden.device)
        part = hidden if index is None else hidden[index]
        for layer in range(segment.lo, segment.hi):
            part = self.stack.layer(layer, part, batch, self.pool.layer(layer))
        if index is None:
            hidden.copy_(part)
        else:
            hidden[index] = part


def _starts(rows: list[Row]) -> list[int]:
    """First packed token of each row."""
    starts, total = [], 0
    for row in rows:
        starts.append(total)
        total += row.length
    return starts


def _token_index(rows: list[Row], segment: Segment, device: torch.device) -> Tensor:
    """Packed positions of the segment's tokens, `[tokens]` int64."""
    starts = _starts(rows)
    return torch.tensor([starts[i] + k for i in segment.rows for k in range(rows[i].length)], device=device)


def _output_index(rows: list[Row], device: torch.device) -> Tensor:
    """Packed positions of the tokens that need logits, `[outputs]` int64."""
    ends = [start + row.length for start, row in zip(_starts(rows), rows, strict=True)]
    wanted = [k for end, row in zip(ends, rows, strict=True) for k in range(end - row.outputs, end)]
    return torch.tensor(wanted, dtype=torch.int64, device=device)
