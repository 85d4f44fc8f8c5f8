"""Running a planned step: one walk up the layers, segment by segment."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.breakpoints import Intervention
from app.gpu.batch import Batch, make_batch
from app.gpu.checkpoints import Captured, StoredTensor
from app.gpu.edits import apply_edit
from app.gpu.host_tensor import HostTensor
from app.gpu.kv_pool import KVPool
from app.gpu.models.base import LayerStack
from app.gpu.passes import Mark, Record, Reinstate
from app.gpu.scheduler import StepPlan
from app.gpu.segments import Row, Segment, cut_segments


@dataclass(frozen=True, slots=True)
class StepResult:
    """`logits` is float32 `[outputs, vocab_size]`: for each row in order, those of its last `row.outputs` tokens.

    `stopped` has the residual stream of each row that pauses, where it stopped.
    """

    logits: Tensor
    stopped: dict[Row, HostTensor] = field(default_factory=dict)


class Runner:
    """Owns the model and the KV pool's tensor. Called from the engine thread, in inference mode."""

    def __init__(self, stack: LayerStack, pool: KVPool) -> None:
        self.stack = stack
        self.pool = pool

    @torch.inference_mode()
    def predict(self, stored: StoredTensor, rows: tuple[int, int], top_k: int) -> list[list[tuple[int, float]]]:
        """Final norm and head on some rows of a residual stream: token ids with natural-log probabilities, best first
        (the logit lens; nostalgebraist, 2020).
        """
        assert isinstance(stored, HostTensor)
        hidden = stored.tensor[rows[0] : rows[1]].to(self.stack.device)
        values, ids = torch.log_softmax(self.stack.head(hidden), dim=-1).topk(top_k)
        return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]

    def run(self, plan: StepPlan) -> StepResult:
        """Compute every row's layers; the plan's block copies have been made."""
        walk = _Walk(self.stack, self.pool, plan.rows)
        for segment in cut_segments(plan.rows):
            walk.run(segment)
        stopped = {row: HostTensor.save(walk.hidden_of(row)) for row in plan.rows if row.way.pauses}
        outputs = walk.outputs()
        if not len(outputs):
            return StepResult(walk.hidden.new_empty(0, self.stack.vocab_size), stopped)
        return StepResult(self.stack.head(walk.hidden[outputs]), stopped)


class _Walk:
    """One step on its way up. `hidden` is the residual stream of all rows packed, `[tokens, hidden_size]`: each row's
    part is at the boundary that the row has reached.
    """

    def __init__(self, stack: LayerStack, pool: KVPool, rows: list[Row]) -> None:
        self._stack, self._pool, self._rows = stack, pool, rows
        self._batches: dict[tuple[int, ...], Batch] = {}
        self._starts: dict[Row, int] = {}
        total = 0
        for row in rows:
            self._starts[row] = total
            total += row.length
        self.hidden = self._embed()
        for row in rows:
            if row.way.lo:
                self._reinstate(row)

    def run(self, segment: Segment) -> None:
        """Take the segment's rows through its layers, and do what is marked at its upper end."""
        members = [self._rows[index] for index in segment.rows]
        batch = self._batches.get(segment.rows)
        if batch is None:
            batch = self._batches[segment.rows] = make_batch(
                [(row.first, row.length) for row in members],
                [row.sequence.blocks for row in members],
                self._pool.block_size,
                self._stack.device,
            )
        index = self._tokens(members)
        part = self.hidden[index]
        for layer in range(segment.lo, segment.hi):
            part = self._stack.layer(layer, part, batch, self._pool.layer(layer))
        self.hidden[index] = part
        for row in members:
            for mark in row.way.marks:
                if mark.boundary == segment.hi:
                    self._act(row, mark)

    def hidden_of(self, row: Row) -> Tensor:
        """The row's part of the residual stream, `[length, hidden_size]`; writing to it changes the row."""
        return self.hidden[self._starts[row] : self._starts[row] + row.length]

    def outputs(self) -> Tensor:
        """Packed positions of the tokens that need logits, `[outputs]` int64."""
        ends = [(self._starts[row] + row.length, row.outputs) for row in self._rows]
        wanted = [index for end, outputs in ends for index in range(end - outputs, end)]
        return torch.tensor(wanted, dtype=torch.int64, device=self.hidden.device)

    def _embed(self) -> Tensor:
        rows, device = self._rows, self._stack.device
        token_ids = [t for row in rows for t in row.sequence.tokens[row.first : row.first + row.length]]
        positions = [p for row in rows for p in range(row.first, row.first + row.length)]
        return self._stack.embed(torch.tensor(token_ids, device=device), torch.tensor(positions, device=device))

    def _tokens(self, members: list[Row]) -> slice | Tensor:
        """Where the rows' tokens are: a slice, which costs no copy, if they are neighbours."""
        first, end = self._starts[members[0]], self._starts[members[-1]] + members[-1].length
        if end - first == sum(row.length for row in members):
            return slice(first, end)
        wanted = [self._starts[row] + offset for row in members for offset in range(row.length)]
        return torch.tensor(wanted, device=self.hidden.device)

    def _reinstate(self, row: Row) -> None:
        checkpoint = row.sequence.checkpoint
        assert checkpoint is not None
        assert isinstance(checkpoint.hidden, HostTensor)
        began = time.perf_counter()
        checkpoint.hidden.load(self.hidden_of(row))
        checkpoint.restore_ms = (time.perf_counter() - began) * 1000

    def _act(self, row: Row, mark: Mark) -> None:
        hidden = self.hidden_of(row)
        for step in mark.steps:
            match step:
                case Intervention():
                    apply_edit(hidden[step.first - row.first : step.end - row.first], step.edit)
                case Record():
                    row.sequence.captures.add(_capture(row, step, hidden))
                case Reinstate():
                    self._reinstate(row)


def _capture(row: Row, record: Record, hidden: Tensor) -> Captured:
    positions = tuple(position for first, end in record.spans for position in range(first, end))
    seen = torch.cat([hidden[first - row.first : end - row.first] for first, end in record.spans])
    tokens = row.sequence.tokens
    return Captured(
        record.breakpoint,
        record.boundary - 1,
        positions,
        tuple(tokens[position] for position in positions),
        HostTensor.save(seen),
    )
