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

from app.gpu.forward.graph_decode import DecodeGraphs, Recorder
from app.gpu.forward.graph_pieces import KeptGraphs, Piece, cut_run
from app.gpu.forward.program_run import RunLayers
from app.gpu.kernels.attention.batch import Batch
from app.gpu.models.base import TOLERANCE, LayerStack

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
    by layer, on the same tensors. So they do once more when they are checked.
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
        self._unchecked = set[Piece]()
        """Pieces that have been recorded and not replayed yet."""
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
            is_sure = replay is not None and piece not in self._unchecked
            if replay is not None and not is_sure:
                self._check(piece, replay)
            else:
                (replay or self._work(piece))()
            replayed &= is_sure
        return replayed

    def head(self) -> tuple[Tensor, bool]:
        """See `RecordedRuns.head`."""
        layers = self._stack.num_layers
        return self._logits, self.run(layers, layers + 1)

    def record(self) -> None:
        """See `RecordedRuns.record`. The rows are padding meanwhile: the rehearsal writes to no session's KV."""
        piece = self._kept.due() if self._records else None
        if piece is None:
            return
        self._kept.make_room(piece)
        self._inputs.clear(piece.bucket)
        try:
            self._kept.keep(piece, self._recorder.record(self._work(piece), beside=True))
            self._unchecked.add(piece)
        except Exception as error:
            # The step that has been launched is none the worse, and those to come run as this one did.
            self._give_up(f"{type(error).__name__}: {error}")

    def _check(self, piece: Piece, replay: Callable[[], None]) -> None:
        """Replay a piece for the first time, and then run it layer by layer: those results and that KV stay. Its graph
        stays if it gives the same. Waits for the device.

        Padding would tell nothing: its attention is zero, whatever the position.
        """
        self._kept.drop(piece)
        self._unchecked.discard(piece)
        work, out = self._work(piece), self._out(piece)
        before = self.hidden[: piece.bucket].clone()
        replay()
        found = out.clone()
        self.hidden[: piece.bucket].copy_(before)
        work()
        size, error = out.norm(dim=-1), found.sub_(out).norm(dim=-1)
        _, batch = self._inputs.first(piece.bucket)
        is_known = (batch.contexts > 0) & size.isfinite()  # edits of a client may have made numbers that are not
        if bool((is_known & ~(error <= TOLERANCE[self._stack.dtype] * size)).any()):
            self._give_up(f"stages {piece.lo} to {piece.hi} give other numbers when they are replayed")
        else:
            self._kept.keep(piece, replay)

    def _give_up(self, reason: str) -> None:
        logger.warning("no more runs of layers are recorded: %s", reason)
        self._records = False

    def _out(self, piece: Piece) -> Tensor:
        """Where a piece leaves its result."""
        return (self._logits if piece.lo == self._stack.num_layers else self.hidden)[: piece.bucket]

    def _work(self, piece: Piece) -> Callable[[], None]:
        """What a piece gives the device. The lowest begins with the embedding, and the stage after the layers is the
        head.
        """
        (bucket, lo, hi), stack = piece, self._stack
        hidden, out = self.hidden[:bucket], self._out(piece)

        def work() -> None:
            if lo == stack.num_layers:
                out.copy_(stack.head(hidden))
                return
            # A new batch each time: a stack may keep what it has made of one, and a graph would lack what makes it.
            token_ids, batch = self._inputs.first(bucket)
            before = hidden if lo else stack.embed(token_ids, batch.positions)
            out.copy_(self._run_layers(lo, hi, before, batch))

        return work
