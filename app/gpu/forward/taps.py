"""What is done inside a layer: its rows' edits, captures and stops, at the points that the layer tells of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from app.domain.points import BETWEEN, Point
from app.domain.positions import clip_runs, positions_of
from app.gpu.forward.boundary import BoundaryActions
from app.gpu.kernels.attention import attention_pattern
from app.gpu.kernels.attention.base import AttentionSpec, Batch
from app.gpu.state.paths import Record
from app.gpu.state.segments import Row, find_alike


class LayerTaps:
    """`Taps` of the layer below a boundary."""

    def __init__(self, actions: BoundaryActions, boundary: int, rows: Sequence[Row], members: Sequence[int]) -> None:
        """`rows` are those of the batch, in its order; `members`, rising, are the places of those that run."""
        self._actions, self._boundary, self._rows, self._members = actions, boundary, rows, members
        self._starts = [0, *accumulate(row.length for row in rows)]
        self._at = dict[Point, list[int]]()
        """The places of the rows that have something to do there."""
        for place in members:
            for point in rows[place].path.points_in(boundary):
                self._at.setdefault(point, []).append(place)

    @property
    def points(self) -> frozenset[Point]:
        """Those at which something is done."""
        return frozenset(self._at)

    @property
    def inside(self) -> LayerTaps | None:
        """For the layer itself; None: it need not tell."""
        return None if set(self._at) <= BETWEEN else self

    def of_row(self, index: int) -> LayerTaps:
        """For a batch of row `index` alone."""
        return LayerTaps(self._actions, self._boundary, [self._rows[index]], [0] if index in self._members else [])

    def enter(self, hidden: Tensor) -> None:
        """The layer is about to take `hidden` `[tokens, hidden_size]`."""
        for place in self._members:
            path = self._rows[place].path
            if path.pauses not in (None, Point.RESID_POST) and path.hi == self._boundary > 1:
                self._actions.keep_base(self._rows[place], self._of(hidden, place, place + 1))
        if self._boundary == 1:
            self(Point.EMBED, hidden)
        self(Point.RESID_PRE, hidden)

    def __call__(self, point: Point, x: Tensor, order: Tensor | None = None) -> None:
        places = self._at.get(point)
        if places is None:
            return
        heads = x.shape[1] if x.dim() == 3 else None
        runs = [(place, place + 1) for place in places]
        if self._starts[-1] == len(self._rows):
            runs = find_alike(self._rows, places, self._boundary, point)
        for first, end in runs:
            part = self._of(x, first, end)
            if order is None:
                self._act(self._rows[first], point, part.view(len(part), -1), heads)
            else:
                ordered = part[..., order]
                self._act(self._rows[first], point, ordered.flatten(1), heads)
                part[..., order] = ordered

    def experts(self, ids: Tensor, weights: Tensor, count: int) -> None:
        """As `Taps` has it."""
        for place in self._at.get(Point.EXPERTS, ()):
            chosen, part = (self._of(each, place, place + 1) for each in (ids.long(), weights))
            dense = torch.zeros(len(part), count, device=part.device).scatter_(1, chosen, part.float())
            self._act(self._rows[place], Point.EXPERTS, dense, None)
            part.copy_(dense.gather(1, chosen))

    def state(self, read: Callable[[Tensor], Tensor], states: Tensor) -> None:
        """As `Taps` has it. Only the last position of a row has a state to show."""
        for place in self._at.get(Point.STATE, ()):
            row = self._rows[place]
            for record in row.path.at(self._boundary, Point.STATE):
                assert isinstance(record, Record)
                last = clip_runs(record.runs, row.end - 1, row.end)
                if last:
                    found = read(states[place : place + 1])
                    self._actions.keep(row, replace(record, runs=last), found, (found.shape[1],))

    def pattern(self, query: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec) -> None:
        """As `Taps` has it."""
        for place in self._at.get(Point.PATTERN, ()):
            row, own = self._rows[place], self._of(query, place, place + 1)
            for record in row.path.at(self._boundary, Point.PATTERN):
                assert isinstance(record, Record)
                heads = record.heads or range(query.shape[1])
                positions = list(positions_of(record.runs))
                chosen = self._actions.choose(row, record.runs, own)
                found = attention_pattern(chosen, kv, batch.block_tables[place], positions, spec, heads)
                self._actions.keep(row, record, found.flatten(1), (len(heads), found.shape[2]), is_own=True)

    def _act(self, row: Row, point: Point, found: Tensor, heads: int | None) -> None:
        self._actions.act(row, self._boundary, found, point, heads)
        if row.path.pauses_at(self._boundary, point):
            self._actions.hold(row, found)

    def _of(self, x: Tensor, first: int, end: int) -> Tensor:
        """The tokens of rows `[first, end)`."""
        return x[self._starts[first] : self._starts[end]]
