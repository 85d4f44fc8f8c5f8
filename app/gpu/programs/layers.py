"""Layers of a resident model over few tokens, as programs; anything else runs as it always has."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from app.gpu.attention.batch import Batch
from app.gpu.attention.cpu.paged import PAGED_TOKENS, token_tables
from app.gpu.cpu.program import Program
from app.gpu.kv_pools.device import KVPool
from app.gpu.models.base import LayerStack
from app.gpu.programs.recording import Arena, NotRecordable, Recording
from app.gpu.programs.run import layer_by_layer

logger = logging.getLogger(__name__)

MOST_TOKENS = 64
"""In a program. With more, what a step takes is products, whichever way they are launched."""


class _Inputs:
    """Memory that all programs read a batch from. Block tables keep entries of earlier steps past a token's context,
    where attention does not look.
    """

    def __init__(self, tokens: int, blocks: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._hidden = torch.empty(tokens, hidden_size, dtype=dtype)
        self._positions, self._blocks, self._offsets = torch.zeros(3, tokens, dtype=torch.int64)
        self._tables = torch.zeros(tokens, blocks, dtype=torch.int32)
        self._contexts = torch.zeros(tokens, dtype=torch.int32)

    def first(self, tokens: int) -> tuple[Tensor, Batch]:
        """The residual stream and the batch of the first `tokens` tokens, as views, each a row of its own."""
        return self._hidden[:tokens], Batch(
            rows=(),
            decodes=tokens,
            positions=self._positions[:tokens],
            slot_blocks=self._blocks[:tokens],
            slot_offsets=self._offsets[:tokens],
            block_tables=self._tables[:tokens],
            contexts=self._contexts[:tokens],
        )

    def fill(self, batch: Batch) -> None:
        tokens = len(batch.positions)
        tables = token_tables(batch, len(batch.rows))
        self._positions[:tokens] = batch.positions
        self._blocks[:tokens] = batch.slot_blocks
        self._offsets[:tokens] = batch.slot_offsets
        self._tables[:tokens, : tables.shape[1]] = tables


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A program of all layers; layer i is launches `[starts[i], starts[i + 1])`, and reads `hidden[i]`."""

    program: Program
    starts: list[int]
    hidden: list[Tensor]
    state: list[Tensor]


class RecordedLayers:
    """A `RunLayers` on a CPU, in inference mode. It records layers when a count of tokens comes for the first time."""

    def __init__(
        self, stack: LayerStack, pool: KVPool, max_model_len: int, on_layer: Callable[[], None] | None = None
    ) -> None:
        """`stack` keeps its weights where they are; `max_model_len` bounds positions. `on_layer` is called before each
        layer that runs without a program.
        """
        self._stack, self._pool = stack, pool
        self._layer_by_layer = layer_by_layer(stack, pool, on_layer)
        self._inputs = _Inputs(MOST_TOKENS, -(-max_model_len // pool.block_size), stack.hidden_size, stack.dtype)
        self._arenas = Arena(), Arena()
        self._recorded: dict[int, _Recorded] = {}
        self._recordable = True

    def __call__(self, lo: int, hi: int, hidden: Tensor, batch: Batch) -> Tensor:
        """See `RunLayers`."""
        tokens = len(hidden)
        if not self._recordable or tokens > MOST_TOKENS or any(row.length > PAGED_TOKENS for row in batch.rows):
            return self._layer_by_layer(lo, hi, hidden, batch)
        self._inputs.fill(batch)
        if tokens not in self._recorded and not (self._makes_room() and self._record(tokens)):
            return self._layer_by_layer(lo, hi, hidden, batch)
        recorded = self._recorded[tokens]
        recorded.hidden[lo].copy_(hidden)
        recorded.program.run(recorded.starts[lo], recorded.starts[hi])
        return recorded.hidden[hi]

    def _makes_room(self) -> bool:
        """Record the most tokens first: then the memory of all other counts lies within theirs. Returns whether that
        could be done.
        """
        return bool(self._recorded) or self._record(MOST_TOKENS)

    def _record(self, tokens: int) -> bool:
        """Returns whether that could be done."""
        recording, (hidden, batch) = Recording(), self._inputs.first(tokens)
        starts, stream = [0], [hidden]
        try:
            for layer in range(self._stack.num_layers):
                with recording.within(self._arenas[layer % 2]):
                    stream.append(self._stack.layer(layer, stream[-1], batch, self._pool.layer(layer)))
                starts.append(len(recording.launches))
        except NotRecordable as reason:
            logger.info("layers run without programs: %s", reason)
            self._recordable = False
            return False
        self._recorded[tokens] = _Recorded(Program(recording.launches), starts, stream, recording.state)
        return True
