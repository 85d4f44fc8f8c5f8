"""Runs a layer stack the way the runner does: packed rows, a paged pool, blocks in no order."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from app.gpu.kernels.attention.base import Batch, make_batch, to_rows
from app.gpu.kv.pools import KVPool
from app.gpu.models.base import LayerStack
from app.gpu.state.layer_state import divide, state_bytes
from tests.gpu.models.oracle import Expected

BLOCK_SIZE = 4


class Drive:
    """Some sequences, their block tables, and how far each has come."""

    def __init__(self, stack: LayerStack, sequences: Sequence[Tensor], kv_dtype: torch.dtype | None = None) -> None:
        """`kv_dtype` None: KV is kept as the stack computes."""
        self.stack = stack
        self.sequences = sequences
        self.done = [0] * len(sequences)
        self.states = torch.zeros((len(sequences), state_bytes(stack.states)), dtype=torch.uint8)
        self.groups = divide(stack.states).groups.size
        widths = [-(-len(tokens) // BLOCK_SIZE) * self.groups for tokens in sequences]
        generator = torch.Generator().manual_seed(2)
        blocks = torch.randperm(sum(widths) + 5, generator=generator).tolist()
        self.tables = [[blocks.pop() for _ in range(width)] for width in widths]
        self.pool = KVPool(stack, sum(widths) + 5, BLOCK_SIZE, dtype=kv_dtype)
        # Leftovers of other sessions: large enough to show wherever a key out of bounds is read.
        noise = torch.randn((*self.pool.data.shape[:-1], stack.head_dim), generator=generator) * 50
        self.pool.data.copy_(to_rows(noise, self.pool.data.dtype))

    def begin(self, step: Mapping[int, int]) -> tuple[list[int], Batch, Tensor]:
        """The rows (sequence numbers) of a step that takes `step[s]` tokens of sequence s, its batch, its token ids."""
        rows = sorted(step, key=lambda row: step[row] != 1)
        spans = [(self.done[row], step[row]) for row in rows]
        tables = [self.tables[row] for row in rows]
        batch = make_batch(spans, tables, BLOCK_SIZE, self.stack.device, self.groups)
        ids = [self.sequences[row][start : start + count] for row, (start, count) in zip(rows, spans, strict=True)]
        for row in rows:
            self.done[row] += step[row]
        return rows, replace(batch, token_ids=torch.cat(ids)), torch.cat(ids)

    def layer(self, index: int, hidden: Tensor, batch: Batch) -> Tensor:
        """One layer over this drive's pool."""
        return self.stack.layer(index, hidden, batch.by_group()[self.pool.group_of[index]], self.pool.layer(index))

    def run(self, steps: Sequence[Mapping[int, int]]) -> list[Expected]:
        """Every boundary and the logits of every sequence, over all steps."""
        parts: list[list[list[Tensor]]] = [[] for _ in self.sequences]
        for step in steps:
            rows, batch, ids = self.begin(step)
            batch = replace(batch, states=self.states[rows])
            states = [self.stack.embed(ids, batch.positions)]
            for index in range(self.stack.num_layers):
                states.append(self.layer(index, states[-1], batch))
            assert batch.states is not None
            self.states[rows] = batch.states
            states.append(self.stack.head(states[-1]))
            pieces = [torch.split(state, [shape.length for shape in batch.rows]) for state in states]
            for place, row in enumerate(rows):
                parts[row].append([piece[place] for piece in pieces])
        joined = [[torch.cat(column) for column in zip(*part, strict=True)] for part in parts]
        return [Expected(states[:-1], states[-1]) for states in joined]


def assert_agrees(found: Expected, expected: Expected, tolerance: float = 1e-4) -> None:
    """Every boundary and the logits agree within `tolerance` of the largest value."""
    assert len(found.boundaries) == len(expected.boundaries)
    named = {f"boundary {k}": pair for k, pair in enumerate(zip(found.boundaries, expected.boundaries, strict=True))}
    for name, (ours, theirs) in {**named, "logits": (found.logits, expected.logits)}.items():
        assert ours.shape == theirs.shape, name
        error = float((ours.float() - theirs).abs().max() / theirs.abs().max())
        assert error < tolerance, f"{name} is off by {error:.1e}"
