"""Decode steps as CUDA graphs: recorded once for each bucket of batch sizes, replayed with one launch.

A step of a small batch is thousands of short kernels, and the host takes longer to launch them than the device to run
them. A graph launches them all at once, but at fixed addresses and in fixed sizes. So a step is padded to the next
bucket and copied into inputs that stay where they are, and its logits come out where they always do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from app.gpu.batch import Batch
from app.gpu.graph_inputs import DecodeInputs
from app.gpu.runner import Decode


class Recorder(Protocol):
    """How a device keeps work that it can be told to do again. For one thread, in inference mode."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What repeats the work that `work` gives the device: on the tensors that it found, whatever they hold then.

        `work` is also run, some times, on what they hold now. What is recorded later may use the memory of what was
        recorded earlier, so a replay's only result is what it writes to tensors from outside. Raises whatever `work`
        does, and RuntimeError if it waits for the device, which cannot be recorded.
        """
        ...

    def forget(self) -> None:
        """Share no memory with what has been recorded until now: nobody holds that any more."""
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
    whoever reads them does so on the stream of the call.
    """

    def __init__(self, limits: DecodeLimits, device: torch.device) -> None:
        self.buckets = batch_buckets(limits.rows)
        self._inputs = DecodeInputs(limits.rows, limits.blocks, device)
        self._logits = torch.empty(limits.rows, limits.vocab_size, dtype=torch.float32, device=device)
        self._replay: dict[int, Callable[[], None]] = {}

    def record(self, bucket: int, decode: Decode, recorder: Recorder) -> None:
        """Record `decode` for batches of up to `bucket` rows."""
        token_ids, batch = self._inputs.first(bucket)
        logits = self._logits[:bucket]  # one output for all: logits that a graph owned would be memory for it alone

        def step() -> None:
            logits.copy_(decode(token_ids, batch))

        self._replay[bucket] = recorder.record(step)

    def __call__(self, token_ids: Tensor, batch: Batch) -> Tensor:
        """See `Decode`; at most as many rows as the limits say. In inference mode."""
        rows = len(token_ids)
        bucket = self.buckets[bisect_left(self.buckets, rows)]
        self._inputs.fill(token_ids, batch, bucket)
        self._replay[bucket]()
        return self._logits[:rows]
