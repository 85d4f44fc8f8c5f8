"""Tokens that grammars allow, as masks of logits: computed on a thread of their own while the device runs the step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.gpu.device.streams import DeviceStreams, Put
from app.gpu.sampling.requests import SampleRequest
from app.grammars.matcher import Matcher
from app.machine.cores import free_from_core

WORD = 32
"""Tokens in one int32."""


class MaskThread:
    """Computes the masks of one step after the other. llguidance releases the GIL meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "djinn-masks", free_from_core)

    def close(self) -> None:
        """Join the thread. Masks that have not begun are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def begin(
        self, requests: Sequence[SampleRequest], vocab_size: int, streams: DeviceStreams, put: Put
    ) -> Mask | None:
        """Begin with the masks of those requests that have a grammar; None if none has. Until they are applied, nobody
        else may use the matchers.
        """
        matchers = {row: request.matcher for row, request in enumerate(requests) if request.matcher is not None}
        if not matchers:
            return None
        bits = streams.host_tensor((len(matchers), -(-vocab_size // WORD)), torch.int32)
        filled = self._thread.submit(_fill, list(matchers.values()), bits.numpy())
        rows = put(np.array(list(matchers), np.int64))
        return Mask(rows, bits, filled, streams)


class Mask:
    """Masks of some rows of a step, which may still be under way."""

    def __init__(self, rows: Tensor, bits: Tensor, filled: Future[None], streams: DeviceStreams) -> None:
        """`rows` is `[masked]` int64 on the device. `bits` is `[masked, words]` int32 on the host, which holds a bit
        for each token once `filled` is done.
        """
        self._rows = rows
        self._bits = bits
        self._filled = filled
        self._streams = streams

    def apply(self, logits: Tensor) -> None:
        """Set the logits of tokens that are not allowed to minus infinity, in place: `[rows, vocab_size]` float32.
        Waits for the masks.
        """
        self._filled.result()
        bits = self._bits
        if not self._streams.on_host:
            bits = torch.empty_like(self._bits, device=logits.device)
            self._streams.compute.copy(bits, self._bits)
        apply_mask(logits, self._rows, bits)

    def abandon(self) -> None:
        """Drop the masks of a step that will not run. Afterwards the matchers may be used again."""
        if not self._filled.cancel():
            self._filled.exception()  # waits


def apply_mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set logits to minus infinity where a bit is 0, in place. All tensors are on one device.

    `logits` is dense `[rows, vocab_size]` float32. `rows` `[masked]` int64 are the rows of the masks, each at most
    once; `bits` `[masked, words]` int32 has a bit for each token, the lowest of a word first.
    """
    if logits.device.type == "cpu":
        from app.gpu.kernels.cpu.elementwise import forbid

        forbid(logits, rows, bits)
    else:
        forbid_on_device(logits, rows, bits)


def forbid_on_device(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """`apply_mask` with PyTorch's operators, which run anywhere."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=logits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits.index_copy_(0, rows, logits[rows].masked_fill(~allowed, -torch.inf))


def _fill(matchers: Sequence[Matcher], bits: NDArray[np.int32]) -> None:
    """Write one row of `bits` for each matcher. A row whose matcher has an error allows all: its turn will fail."""
    for matcher, row in zip(matchers, bits, strict=True):
        matcher.fill(row.ctypes.data, row.nbytes)
        if matcher.error is not None:
            row.fill(-1)
