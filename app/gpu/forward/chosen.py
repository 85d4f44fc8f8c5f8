"""The rows of a residual stream that edits and captures choose: places are found once, whatever happens there."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from app.domain.breakpoints import Intervention
from app.domain.positions import Runs, positions_of
from app.gpu.device.staging import Put
from app.gpu.state.paths import Record
from app.gpu.state.segments import Row


class Chosen:
    """Puts its inputs on the device when it is made. `hidden` is always the part of the residual stream that belongs to
    the row, `[length, hidden_size]`.
    """

    def __init__(self, rows: list[Row], put: Put) -> None:
        self._indices: dict[tuple[Row, Runs], Tensor] = {}
        self._tokens: dict[tuple[Row, Runs], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for row in rows:
            for step in row.path.steps:
                if not isinstance(step, Intervention | Record) or len(step.runs) == 1:
                    continue
                if (row, step.runs) not in self._indices:
                    index = np.fromiter(positions_of(step.runs), np.int64) - row.first
                    self._indices[row, step.runs] = put(index)

    @contextmanager
    def changing(self, row: Row, runs: Runs, hidden: Tensor) -> Iterator[Tensor]:
        """The chosen rows, `[positions, hidden_size]`; what is written to them is written to `hidden`."""
        if len(runs) == 1:
            yield self._view(row, runs, hidden)
            return
        index = self._indices[row, runs]
        chosen = hidden.index_select(0, index)
        yield chosen
        hidden.index_copy_(0, index, chosen)

    def copy(self, row: Row, runs: Runs, hidden: Tensor) -> Tensor:
        """The chosen rows in memory of their own."""
        if len(runs) == 1:
            return self._view(row, runs, hidden).clone(memory_format=torch.contiguous_format)
        return hidden.index_select(0, self._indices[row, runs])

    def tokens(self, row: Row, runs: Runs) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The chosen positions, and the tokens there."""
        if (row, runs) not in self._tokens:
            positions = tuple(positions_of(runs))
            token_ids = row.sequence.tokens
            self._tokens[row, runs] = positions, tuple(token_ids[position] for position in positions)
        return self._tokens[row, runs]

    @staticmethod
    def _view(row: Row, runs: Runs, hidden: Tensor) -> Tensor:
        [run] = runs
        return hidden[run.first - row.first : run.end - row.first : run.step]
