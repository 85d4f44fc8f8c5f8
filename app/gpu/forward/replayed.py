"""One step of single tokens on its way up the layers, where runs of layers have been recorded."""

from typing import Protocol

import numpy as np
from torch import Tensor

from app.gpu.device.staging import Put
from app.gpu.forward.batches import Batches
from app.gpu.forward.walk import TokenIds
from app.gpu.forward.watch import Watch
from app.gpu.kernels.attention.batch import Batch
from app.gpu.state.segments import Row, cut_segments, find_alike


class RecordedRuns(Protocol):
    """Runs of layers, and the head, over rows of one token each that stay where they are. In inference mode."""

    hidden: Tensor
    """`[most rows, hidden_size]`: the residual stream of the rows that were taken, between two runs."""

    def take(self, token_ids: Tensor, batch: Batch, absent: Tensor | None) -> None:
        """The rows that the next runs are for: `[rows]` int64 token ids, and the places, `[absent]` int64, of those
        that are not there for now. Their part of `hidden` has no meaning.
        """
        ...

    def run(self, lo: int, hi: int) -> bool:
        """Take `hidden` through layers `[lo, hi)`, from layer 0 on beginning with the embedding. Returns whether all of
        it was replayed.
        """
        ...

    def head(self) -> tuple[Tensor, bool]:
        """Float32 logits `[at least rows, vocab_size]` of `hidden`, which last until the next call and may be written
        to; and whether that was replayed.
        """
        ...

    def record(self) -> None:
        """Record a part of what was not replayed, if it is wanted often: behind the work that has been launched.
        `hidden` has no meaning afterwards.
        """
        ...


class ReplayedWalk:
    """The same as `Walk` for rows of one token each; `replayed` says whether all layers and the head were replayed.

    It puts its inputs on the device when it is made; they must be there before `run`.
    """

    def __init__(
        self,
        runs: RecordedRuns,
        vocab_size: int,
        batches: Batches,
        rows: list[Row],
        token_ids: TokenIds,
        put: Put,
        watch: Watch,
    ) -> None:
        self._runs, self._vocab_size, self._rows = runs, vocab_size, rows
        self._token_ids, self._batch = token_ids, batches.place(rows, put)
        self._segments = cut_segments(rows)
        self._absent = {
            members: self._find_absent(members, put) for members in dict.fromkeys(each.rows for each in self._segments)
        }
        outputs = [place for place, row in enumerate(rows) if row.outputs]
        self._has_outputs = bool(outputs)
        whole = len(outputs) == len(rows)
        self._outputs: slice | Tensor = slice(len(rows)) if whole else put(np.array(outputs, np.int64))
        self._watch = watch
        self.captured, self.stopped = watch.captured, watch.stopped
        self.replayed = True

    def run(self) -> Tensor:
        """Launch all of it; returns float32 logits `[outputs, vocab_size]`: those of the rows that have some."""
        members: tuple[int, ...] | None = None
        token_ids = self._token_ids()
        if not self._segments:
            self._runs.take(token_ids, self._batch, None)
        elif self._segments[0].lo:
            self._runs.hidden.zero_()  # no embedding does: what earlier steps have left there must not grow for ever
        for segment in self._segments:
            if segment.rows != members:
                members = segment.rows
                self._runs.take(token_ids, self._batch, self._absent[members])
            for place in members:
                if 0 < segment.lo == self._rows[place].path.lo:
                    self._load_checkpoint(place)
            self.replayed &= self._runs.run(segment.lo, segment.hi)
            self._act(members, segment.hi)
        for place, row in enumerate(self._rows):
            if row.path.lo == row.path.hi:  # it has paused after the last layer
                self._load_checkpoint(place)
        if not self._has_outputs:
            return self._runs.hidden.new_empty(0, self._vocab_size)
        logits, replayed = self._runs.head()
        self.replayed &= replayed
        return logits[self._outputs]

    def _act(self, members: tuple[int, ...], boundary: int) -> None:
        """Do what is marked here. A row that pauses is copied: the layers above run in its place too."""
        for first, end in find_alike(self._rows, members, boundary):
            row = self._rows[first]
            if row.path.steps:
                self._watch.act(row, boundary, self._runs.hidden[first:end])
            if row.path.pauses and row.path.hi == boundary:
                self._watch.stop(row, self._hidden_of(first).clone())

    def _load_checkpoint(self, place: int) -> None:
        self._watch.load_checkpoint(self._rows[place], self._hidden_of(place))

    def _hidden_of(self, place: int) -> Tensor:
        return self._runs.hidden[place : place + 1]

    def _find_absent(self, members: tuple[int, ...], put: Put) -> Tensor | None:
        if len(members) == len(self._rows):
            return None
        return put(np.array(sorted(set(range(len(self._rows))) - set(members)), np.int64))
