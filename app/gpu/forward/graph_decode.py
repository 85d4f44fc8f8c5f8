"""Decode steps as CUDA graphs: recorded once for each bucket of batch sizes, replayed with one launch.

A step of a small batch is thousands of short kernels, and the host takes longer to launch them than the device to run
them. A graph launches them all at once, but at fixed addresses and in fixed sizes. So a step is padded to the next
bucket and copied into inputs that stay where they are, and its logits come out where they always do.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from app.gpu.forward.runner import Decode
from app.gpu.kernels.attention.batch import Batch

PADDING = (0, 0, -1, 0)
"""Token id, position, slot block and slot offset of a padding row; its context and its block table are 0 (`Batch`)."""


class DecodeInputs:
    """Room for `rows` rows of one token, each of at most `blocks` blocks. Steps recorded with n rows read the first n.

    Block tables keep entries of earlier steps past a row's context, where no attention may look.
    """

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        self._padding = torch.tensor(PADDING, device=device)[:, None]
        self._columns = self._padding.repeat(1, rows)
        """`[4, rows]` int64: token ids, positions, slot blocks, slot offsets."""
        self._contexts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(rows, blocks, dtype=torch.int32, device=device)

    def first(self, rows: int) -> tuple[Tensor, Batch]:
        """Token ids and batch of the first `rows` rows, as views. The batch has no rows on the host: whatever reads
        them cannot be recorded, and must fail rather than keep what it has read.
        """
        token_ids, positions, slot_blocks, slot_offsets = (column[:rows] for column in self._columns)
        return token_ids, Batch(
            rows=(),
            decodes=rows,
            positions=positions,
            slot_blocks=slot_blocks,
            slot_offsets=slot_offsets,
            block_tables=self._tables[:rows],
            contexts=self._contexts[:rows],
        )

    def fill(self, token_ids: Tensor, batch: Batch, rows: int) -> None:
        """Copy a step in, behind what the device does now, and make padding of what is left of the first `rows`."""
        if self._columns.is_cuda:
            from app.gpu.forward.graph_triton_inputs import fill_inputs  # a CPU needs nothing of Triton

            fill_inputs(token_ids, batch, self._columns, self._contexts, self._tables, rows)
            return
        count, width = batch.block_tables.shape
        given = (token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets)
        for column, values in enumerate(given):
            self._columns[column, :count].copy_(values)
        self._contexts[:count].copy_(batch.contexts)
        self._tables[:count, :width].copy_(batch.block_tables)
        if count < rows:
            self._clear(count, rows)

    def pad(self, places: Tensor) -> None:
        """Make padding of the rows at `places`, `[rows]` int64 on the device, until they are filled again."""
        self._columns.index_copy_(1, places, self._padding.expand(-1, len(places)))
        self._contexts.index_fill_(0, places, 0)
        self._tables[:, 0].index_fill_(0, places, 0)

    def clear(self, rows: int) -> None:
        """Make padding of the first `rows`."""
        self._clear(0, rows)

    def _clear(self, first: int, end: int) -> None:
        self._columns[:, first:end] = self._padding
        self._contexts[first:end] = 0
        self._tables[first:end, 0] = 0


class Recorder(Protocol):
    """How a device keeps work that it can be told to do again. For one thread, in inference mode."""

    def record(self, work: Callable[[], None], *, beside: bool = False) -> Callable[[], None]:
        """What repeats the work that `work` gives the device: on the tensors that it found, whatever they hold then.

        `work` is also run, some times, on what they hold now. What is recorded later may use the memory of what was
        recorded earlier, so a replay's only result is what it writes to tensors from outside. Raises whatever `work`
        does, and RuntimeError if it waits for the device, which cannot be recorded.

        `beside` work of other threads, such as copies of KV, nobody waits for the device. Then `work` must be part of
        what has been recorded.
        """
        ...

    def forget(self) -> None:
        """Share no memory with earlier recordings: they have been released."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """The largest step: `rows` rows, each of `blocks` KV blocks, with logits over `vocab_size` tokens."""

    rows: int
    blocks: int
    vocab_size: int


def batch_buckets(largest: int) -> list[int]:
    """Batch sizes to record: 1, 2, 4, 8 and on in steps of 8, or of about an eighth where that is more, up to
    `largest`.
    """
    buckets, size = [], 1
    while size < largest:
        buckets.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 4))
    return [*buckets, largest]


class DecodeGraphs:
    """A `Decode` that replays what `record` has recorded. The logits that it returns last until it is called again;
    readers use the stream of the call.
    """

    def __init__(self, limits: DecodeLimits, device: torch.device) -> None:
        self.buckets = batch_buckets(limits.rows)
        self.inputs = DecodeInputs(limits.rows, limits.blocks, device)
        self.logits = torch.empty(limits.rows, limits.vocab_size, dtype=torch.float32, device=device)
        self._replay: dict[int, Callable[[], None]] = {}

    def record(self, bucket: int, decode: Decode, recorder: Recorder) -> None:
        """Record `decode` for batches of up to `bucket` rows."""
        token_ids, batch = self.inputs.first(bucket)
        logits = self.logits[:bucket]  # one output for all: logits that a graph owned would be memory for it alone

        def step() -> None:
            logits.copy_(decode(token_ids, batch))

        self._replay[bucket] = recorder.record(step)

    def __call__(self, token_ids: Tensor, batch: Batch) -> Tensor:
        """See `Decode`; at most as many rows as the limits say. In inference mode."""
        rows = len(token_ids)
        bucket = self.buckets[bisect_left(self.buckets, rows)]
        self.inputs.fill(token_ids, batch, bucket)
        self._replay[bucket]()
        return self.logits[:rows]
