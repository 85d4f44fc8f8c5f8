"""Runs of layers as CUDA graphs, for decode steps in which something is done to rows between two layers.

A graph of the whole step has no place where a client could look in or reach in. So such a step replays the layers up to
that place, does there what is to be done, and replays the others. All rows stay where they are: one that has left, or
has not joined yet, is padding meanwhile.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from app.gpu.attention.batch import Batch
from app.gpu.graphs.decode import DecodeGraphs, Recorder
from app.gpu.graphs.pieces import KeptGraphs, Piece, cut_run
from app.gpu.models.base import LayerStack
from app.gpu.programs.run import RunLayers

logger = logging.getLogger(__name__)

KEPT_PASSES = 8
"""Graphs of pieces are kept with as many layers in all as so many whole steps have: enough for one armed layer at
batches of any size, or for eight layers at one size."""


def run_buckets(buckets: list[int]) -> list[int]:
    """Those that pieces are recorded for: powers of two, and the largest. A device that reads weights takes about as
    long for 33 rows as for 64, and each bucket has graphs for every piece.
    """
    return [bucket for bucket in buckets if bucket & (bucket - 1) == 0 or bucket == buckets[-1]]


class RunGraphs:
    """A `RecordedRuns`. Pieces of runs are recorded when they have been wanted a few times; until then they run layer
    by layer, on the same tensors.
    """

    def __init__(self, stack: LayerStack, run_layers: RunLayers, whole: DecodeGraphs, recorder: Recorder) -> None:
        """`whole` has been recorded with `recorder`, so that its kernels are compiled and do not wait. The graphs here
        read the same inputs, and write the same logits.
        """
        self._stack, self._run_layers = stack, run_layers
        self._inputs, self._logits, self._recorder = whole.inputs, whole.logits, recorder
        self._buckets = run_buckets(whole.buckets)
        self._bucket = self._buckets[-1]
        self.hidden = torch.zeros(self._bucket, stack.hidden_size, dtype=stack.dtype, device=stack.device)
        self._kept = KeptGraphs(KEPT_PASSES * (stack.num_layers + 1))
        self._records = True

    def take(self, token_ids: Tensor, batch: Batch, absent: Tensor | None) -> None:
        """See `RecordedRuns.take`."""
        self._bucket = self._buckets[bisect_left(self._buckets, len(token_ids))]
        self._inputs.fill(token_ids, batch, self._bucket)
        if absent is not None:
            self._inputs.pad(absent)

    def run(self, lo: int, hi: int) -> bool:
        """See `RecordedRuns.run`."""
        replayed = True
        for piece in cut_run(self._bucket, lo, hi):
            replay = self._kept.find(piece)
            (replay or self._work(piece))()
            replayed &= replay is not None
        return replayed

    def head(self) -> tuple[Tensor, bool]:
        """See `RecordedRuns.head`."""
        layers = self._stack.num_layers
        return self._logits, self.run(layers, layers + 1)

    def record(self) -> None:
        """See `RecordedRuns.record`. The rows are padding meanwhile: the rehearsal writes to nobody's KV."""
        piece = self._kept.due() if self._records else None
        if piece is None:
            return
        self._kept.make_room(piece)
        self._inputs.clear(piece.bucket)
        try:
            self._kept.keep(piece, self._recorder.record(self._work(piece), beside=True))
        except Exception as error:
            # The step that has been launched is none the worse, and those to come run as this one did.
            logger.warning("no more runs of layers are recorded: %s: %s", type(error).__name__, error)
            self._records = False

    def _work(self, piece: Piece) -> Callable[[], None]:
        """What a piece gives the device. The lowest begins with the embedding, and the stage after the layers is the
        head.
        """
        (bucket, lo, hi), stack = piece, self._stack
        token_ids, batch = self._inputs.first(bucket)
        hidden, logits = self.hidden[:bucket], self._logits[:bucket]

        def work() -> None:
            if lo == stack.num_layers:
                logits.copy_(stack.head(hidden))
                return
            before = hidden if lo else stack.embed(token_ids, batch.positions)
            hidden.copy_(self._run_layers(lo, hi, before, batch))

        return work
