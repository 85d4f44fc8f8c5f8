"""What breakpoints do at the points of a pass: edits, captures and checkpoints of rows, and host copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.domain.breakpoints import (
    Edit,
    EditOp,
    Gate,
    Intervention,
    PartKind,
    Probe,
    TensorData,
    TensorParts,
    TopFeatures,
)
from app.domain.points import Point
from app.domain.positions import Runs, positions_of
from app.gpu.device.hardware import dtype_name
from app.gpu.device.streams import PASSED, DeviceStreams, Event, Put
from app.gpu.forward.uploads import activation, best_features, is_active
from app.gpu.state.checkpoints import Captured, GetUpload, StoredTensor
from app.gpu.state.paths import LoadCheckpoint, ReadFeature, Record
from app.gpu.state.segments import Row

KEPT_VECTORS = 256
PlaceTensor = Callable[[TensorData], Tensor]
"""Gives the tensor of an edit where the residual stream is. It is not to be written to."""


def as_tensor(data: TensorData) -> Tensor:
    """The tensor in its own shape and dtype, in host memory. Not to be written to."""
    return torch.frombuffer(bytearray(data.data), dtype=getattr(torch, data.dtype)).view(data.shape)


def vectors_on(device: torch.device, streams: DeviceStreams) -> PlaceTensor:
    """Brings tensors of edits to the device, as float32 and without waiting. Keeps vectors: each step may ask again."""

    def bring(data: TensorData) -> Tensor:
        here = as_tensor(data)
        sent = streams.host_tensor(tuple(here.shape), here.dtype).copy_(here)
        there = torch.empty(here.shape, dtype=here.dtype, device=device)
        streams.compute.copy(there, sent)
        return there.float()

    kept = lru_cache(maxsize=KEPT_VECTORS)(bring)
    return lambda data: kept(data) if len(data.shape) == 1 else bring(data)


def apply_edit(
    hidden: Tensor, edit: Edit, get: GetUpload, place: PlaceTensor = as_tensor, active: Tensor | None = None
) -> None:
    """Change `hidden` `[positions, width]` in place. `place` gives the edit's tensors where `hidden` is. `active`,
    `[positions, 1]`, are the activations of its feature where that reads another point.
    """
    part, whole, chosen = edit.part, hidden, None
    vector = None if edit.vector is None else place(edit.vector).float()
    if part is not None:
        chosen = place(_numbers(part.chosen)).long()
        whole = hidden.unflatten(1, (part.of, -1)) if part.kind is PartKind.HEADS else hidden
        vector = None if vector is None else _part_of_vector(vector, whole.shape[1:], chosen)
    before = (hidden if chosen is None else whole.index_select(1, chosen)).float()
    if edit.feature is not None and edit.feature.reads is None and vector is not None:
        active = activation(before, vector[: -before.shape[1]], edit.feature, get)
    after = _changed(before, edit, vector, active)
    if edit.keep_norm:
        lengths = _lengths(after)
        after = torch.where(lengths > 0, after * (_lengths(before) / lengths), after.double()).float()
    if edit.max_norm is not None:
        change = after - before
        after = before + change * (edit.max_norm / _lengths(change)).clamp(max=1.0)
    if edit.gate is not None:
        holds = _holds(hidden.float(), edit.gate, place, get)
        after = torch.where(holds.view(-1, *[1] * (before.ndim - 1)), after, before)
    if chosen is None:
        hidden.copy_(after)
    else:
        whole.index_copy_(1, chosen, after.to(hidden.dtype))


@lru_cache(maxsize=KEPT_VECTORS)
def _numbers(chosen: tuple[int, ...]) -> TensorData:
    """In a dtype that float32, in which `place` brings it, has without rounding: no point is that wide."""
    return TensorData("int32", (len(chosen),), np.asarray(chosen, "<i4").tobytes())


def _part_of_vector(vector: Tensor, shape: torch.Size, chosen: Tensor) -> Tensor:
    """The part of `[width]` or `[rows, width]` that goes with what is chosen of a position's `shape`, `[neurons]` or
    `[heads, head_dim]`. A vector that is only for the part, or for any one head, stays what it is.
    """
    if vector.shape[-1] != shape.numel():
        return vector if len(shape) == 1 else vector.unsqueeze(-2)
    parts: Tensor = vector.unflatten(-1, shape)
    return parts.index_select(vector.ndim - 1, chosen)


def _lengths(tensor: Tensor) -> Tensor:
    """L2, over the last dimension, in float64: squares overflow float32."""
    lengths: Tensor = torch.linalg.vector_norm(tensor, dim=-1, keepdim=True, dtype=torch.float64)
    return lengths


def _holds(hidden: Tensor, gate: Gate, place: PlaceTensor, get: GetUpload) -> Tensor:
    """Whether the gate does, for each of `hidden` float32 `[positions, width]`."""
    along = place(gate.along).float()
    value = (hidden * along).sum(-1) if gate.hidden is None else _output(hidden, along, gate.hidden)[:, 0]
    holds = torch.ones_like(value, dtype=torch.bool)
    active = holds if gate.of_topk is None else is_active(hidden, gate.of_topk, get)[:, 0]
    if gate.above is not None:
        holds = holds & active & (value > gate.above)
    if gate.below is not None:
        holds = holds & (~active | (value < gate.below))
    return holds


def _changed(hidden: Tensor, edit: Edit, vector: Tensor | None, active: Tensor | None) -> Tensor:
    """`hidden` float32 `[positions, ..., width]` after the edit's operation alone. `active` is what its feature is."""
    if active is not None and vector is not None:
        aim = active * edit.factor if edit.op is EditOp.SCALE else edit.factor if edit.op is EditOp.CLAMP else 0.0
        return hidden + (aim - active) * vector[-hidden.shape[1] :]
    if edit.op is EditOp.SCALE:
        return hidden * edit.factor
    if vector is None:
        return torch.zeros_like(hidden)
    if edit.op is EditOp.ADD:
        return hidden + edit.factor * vector
    if edit.op in (EditOp.REPLACE, EditOp.ABLATE):
        return vector.expand_as(hidden)
    unit: Tensor = vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    # Unlike a product's, the bits of a sum on a CPU are the same for any number of rows.
    component = (hidden * unit).sum(-1, keepdim=True)
    wanted = edit.factor if edit.op is EditOp.CLAMP else 0.0
    return hidden + (wanted - component) * unit


def probed(hidden: Tensor, probe: Probe, place: PlaceTensor) -> Tensor:
    """What a probe makes of `hidden` `[positions, width]`: `[positions, 1]` in float32."""
    found = _output(hidden.float(), place(probe.weights), probe.hidden)
    return torch.sigmoid(found) if probe.sigmoid else found


def _output(rows: Tensor, weights: Tensor, neurons: int) -> Tensor:
    """The last number of a probe for each of `[rows, width]`, `[rows, 1]`."""
    width = rows.shape[1]
    if neurons:
        first, bias, weights = weights.tensor_split([neurons * width, neurons * (width + 1)])
        rows = torch.relu(torch.nn.functional.linear(rows, first.view(neurons, width), bias))
    found: Tensor = (rows * weights[:-1]).sum(-1, keepdim=True) + weights[-1]
    return found


class HostTensor:
    """`[positions, width]`, complete when `tensor` is read. Nothing changes it."""

    def __init__(self, tensor: Tensor, streams: DeviceStreams, copied: Event = PASSED, save_ms: float = 0.0) -> None:
        self._tensor = tensor
        self._streams = streams
        self._copied = copied
        self.save_ms = save_ms
        self.dtype = dtype_name(tensor.dtype)
        self.shape = (tensor.shape[0], tensor.shape[1])
        self.nbytes = tensor.nbytes

    @classmethod
    def save(cls, hidden: Tensor, streams: DeviceStreams) -> HostTensor:
        """Copy `[positions, width]` once computed, beside the next work. Nothing may write to it any more."""
        began = time.perf_counter()
        saved = streams.host_tensor(tuple(hidden.shape), hidden.dtype)
        streams.saves.wait(streams.compute.record())
        streams.saves.copy(saved, hidden)
        return cls(saved, streams, streams.saves.record(), (time.perf_counter() - began) * 1000)

    @classmethod
    def of(cls, data: TensorData, streams: DeviceStreams) -> HostTensor:
        """A tensor that a client has sent."""
        return cls(_copy(as_tensor(data), streams), streams)

    @classmethod
    def joined(cls, parts: Sequence[StoredTensor]) -> HostTensor:
        """The rows of all parts, in this order. Waits for them."""
        saved = [part for part in parts if isinstance(part, HostTensor)]
        if len(saved) == 1:
            return saved[0]
        streams, save_ms = saved[0]._streams, sum(part.save_ms for part in saved)
        return cls(_copy(torch.cat([part.tensor for part in saved]), streams), streams, save_ms=save_ms)

    @property
    def tensor(self) -> Tensor:
        """Waits for the copy if it is still under way."""
        self._copied.synchronize()
        return self._tensor

    def load(self, hidden: Tensor, first: int = 0) -> None:
        """Put rows from `first` on into `hidden`, as many as it has, before what is launched next reads it."""
        self._streams.compute.wait(self._copied)
        self._streams.compute.copy(hidden, self._tensor[first : first + len(hidden)])

    def read(self, first: int, end: int) -> TensorData:
        """Rows `[first, end)` as bytes."""
        rows = self.tensor[first:end].contiguous()
        return TensorData(self.dtype, tuple(rows.shape), rows.view(torch.uint8).numpy().tobytes())

    def view(self) -> TensorParts:
        """All rows, without a copy."""
        flat = self.tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        return TensorParts(self.dtype, self.shape, (flat.data.toreadonly(),))

    def edited(self, first: int, end: int, edit: Edit, get: GetUpload) -> HostTensor:
        """The same with `edit` applied to rows `[first, end)`."""
        changed = _copy(self.tensor, self._streams)
        apply_edit(changed[first:end], edit, get)
        return HostTensor(changed, self._streams, save_ms=self.save_ms)

    def chosen(self, rows: Sequence[int]) -> HostTensor:
        """These rows alone."""
        return HostTensor(_copy(self.tensor[list(rows)], self._streams), self._streams, save_ms=self.save_ms)

    def norms(self, first: int, end: int) -> list[float]:
        """The L2 length of rows `[first, end)`. In float64, as squares of large numbers would overflow."""
        found: list[float] = torch.linalg.vector_norm(self.tensor[first:end].double(), dim=1).tolist()
        return found

    def cosines(self, first: int, end: int, vector: TensorData) -> list[float]:
        """The cosine of rows `[first, end)` to a vector `[hidden_size]`; NaN for a row of zeros."""
        rows, wanted = self.tensor[first:end].double(), as_tensor(vector).double()
        found: list[float] = (rows @ wanted / torch.linalg.vector_norm(rows, dim=1) / wanted.norm()).tolist()
        return found

    def is_finite(self) -> bool:
        """Whether it has neither NaN nor infinity."""
        return bool(torch.isfinite(self.tensor).all())


def _copy(tensor: Tensor, streams: DeviceStreams) -> Tensor:
    """The same in memory that is fast to copy to the device."""
    return streams.host_tensor(tuple(tensor.shape), tensor.dtype).copy_(tensor)


class Stopped(NamedTuple):
    """A row that has paused: what stood at its point, the residual stream below the layer if that is inside of one that
    has others below, and what layers below that fold have left, if any do.
    """

    hidden: HostTensor
    base: HostTensor | None
    states: HostTensor | None


class BoundaryActions:
    """Edits, captures and checkpoints of a step's rows at the points of a pass. What `found` means is always the row's
    part of what stands at a point, `[length, width]`. Indices of scattered positions are put on the device when this is
    made; only the tensors of edits come later, through `place`, and `get` gives those of uploads.
    """

    def __init__(
        self, rows: Sequence[Row], put: Put, streams: DeviceStreams, place: PlaceTensor, get: GetUpload
    ) -> None:
        self._streams, self._place, self._get = streams, place, get
        self.captured: dict[Row, list[Captured]] = {}
        """Captures of breakpoints; the sessions get them only when the step is over."""
        self.stopped: dict[Row, Stopped] = {}
        """What is kept of each row that pauses."""
        self._held: dict[Row, HostTensor] = {}
        self._bases: dict[Row, HostTensor] = {}
        """Of rows that pause inside a layer, until it has run."""
        self._active: dict[tuple[Row, Runs, bytes], Tensor] = {}
        """Of features that an edit will change further up the layer, by the digest of the edit."""
        self._tokens: dict[tuple[Row, Runs], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Chosen positions, and the tokens there: found once, at however many points they are captured."""
        self._indices: dict[tuple[Row, Runs], Tensor] = {}
        for row in rows:
            for step in row.path.steps:
                if isinstance(step, LoadCheckpoint) or len(step.runs) == 1 or (row, step.runs) in self._indices:
                    continue
                index = np.fromiter(positions_of(step.runs), np.int64) - row.first
                self._indices[row, step.runs] = put(index)

    def enter(self, row: Row, found: Tensor, *, at_point: bool = False) -> None:
        """Put in place what the row's pass goes on with: the residual stream, or `at_point` what stands there."""
        checkpoint = row.sequence.checkpoint
        assert checkpoint is not None
        kept = checkpoint.base if checkpoint.is_inside and not at_point else checkpoint.hidden
        assert isinstance(kept, HostTensor)
        began = time.perf_counter()
        kept.load(found, row.first - checkpoint.first)
        checkpoint.restore_ms = (time.perf_counter() - began) * 1000

    def act(
        self,
        row: Row,
        boundary: int,
        found: Tensor,
        point: Point = Point.RESID_POST,
        heads: int | None = None,
        *,
        skipped: int = 0,
    ) -> None:
        """Do what is marked at the point that the row has reached, which may have `heads`. `found` may go on behind a
        row of one token with the neighbours that `find_alike` finds: they are edited at once. It is without the row's
        first `skipped` tokens, and without what follows the last one with something to do.
        """
        for step in row.path.at(boundary, point):
            match step:
                case Intervention():
                    chosen = found if row.length == 1 else self.choose(row, step.runs, found, skipped)
                    active = self._active.get((row, step.runs, step.edit.digest())) if self._active else None
                    apply_edit(chosen, step.edit, self._get, self._place, active)
                    if len(step.runs) > 1:
                        found.index_copy_(0, self._indices[row, step.runs] - skipped, chosen)
                case Record():
                    self._capture(row, step, found, heads, skipped)
                case ReadFeature():
                    feature, vector = step.edit.feature, step.edit.vector
                    assert feature is not None
                    assert vector is not None
                    chosen, encoder = self.choose(row, step.runs, found), self._place(vector)[: found.shape[1]]
                    read = activation(chosen.float(), encoder, feature, self._get)
                    self._active[row, step.runs, step.edit.digest()] = read
                case LoadCheckpoint():
                    self.enter(row, found, at_point=True)

    def hold(self, row: Row, found: Tensor) -> None:
        """Save what stands at a point inside a layer, where the row pauses."""
        self._held[row] = self._save(found)

    def keep_base(self, row: Row, hidden: Tensor) -> None:
        """Save the residual stream that the layer takes in which the row pauses."""
        self._bases[row] = self._save(hidden)

    def stop(self, row: Row, hidden: Tensor | None, states: Tensor | None) -> None:
        """Save a row that pauses here, or that `hold` has saved inside the layer, and the `states` that layers below
        have left, `[1, bytes]`; nothing may write to these any more.
        """
        kept = None if states is None else HostTensor.save(states, self._streams)
        saved = self._held.pop(row) if hidden is None else HostTensor.save(hidden, self._streams)
        self.stopped[row] = Stopped(saved, self._bases.pop(row, None), kept)

    def choose(self, row: Row, runs: Runs, found: Tensor, skipped: int = 0) -> Tensor:
        """The chosen positions, `[positions, ...]`: a view where they are one run, else a copy."""
        if len(runs) > 1:
            index = self._indices[row, runs]
            return found.index_select(0, index - skipped if skipped else index)
        [run], first = runs, row.first + skipped
        return found[run.first - first : run.end - first : run.step]

    def _capture(self, row: Row, record: Record, found: Tensor, heads: int | None, skipped: int) -> None:
        chosen = self.choose(row, record.runs, found, skipped)
        shape: tuple[int, ...] = (found.shape[1],)
        match record.reads:
            case Probe() as probe:
                self.keep(row, record, probed(chosen, probe, self._place), (1,))
                return
            case TopFeatures() as asked:
                best = best_features(chosen, self._get(asked.digest), asked.k, asked.top_k)
                self.keep(row, record, best, (2 * asked.top_k,))
                return
            case Gate() as gate:
                self.keep(row, record, self._where(chosen, gate), (1,))
                return
        held = None if record.gate is None else self._where(chosen, record.gate)
        if heads is not None:
            by_head = chosen.unflatten(1, (heads, -1))
            shape = (len(record.heads) or heads, by_head.shape[2])
            if record.heads:
                chosen = torch.cat([by_head[:, head] for head in record.heads], dim=1)
        self.keep(row, record, chosen, shape, held)

    def _where(self, chosen: Tensor, gate: Gate) -> Tensor:
        """1 where the gate holds, else 0, float32 `[positions, 1]`."""
        return _holds(chosen.float(), gate, self._place, self._get).float()[:, None]

    def keep(
        self,
        row: Row,
        record: Record,
        chosen: Tensor,
        shape: tuple[int, ...],
        held: Tensor | None = None,
        *,
        is_own: bool = False,
    ) -> None:
        """Keep what was chosen as it is now, `[positions, numbers]`, each of that shape, where it is `held`: everywhere
        without that. `is_own`: it was made to be kept, and nothing writes to it.
        """
        runs = record.runs
        if (row, runs) not in self._tokens:
            positions = tuple(positions_of(runs))
            self._tokens[row, runs] = positions, tuple(row.sequence.tokens[position] for position in positions)
        seen, tokens = self._save(chosen, is_own=is_own), self._tokens[row, runs]
        captured = Captured(record.breakpoint, record.layer, *tokens, seen, record.point, shape, record.heads)
        captured.reads = None if record.is_kept else record.reads
        captured.holds = None if held is None else self._save(held)
        self.captured.setdefault(row, []).append(captured)

    def _save(self, found: Tensor, *, is_own: bool = False) -> HostTensor:
        """As it is now, in memory that nothing else writes to."""
        if self._streams.on_host:  # a copy is done when its call returns
            return HostTensor(found, self._streams) if is_own else HostTensor.save(found, self._streams)
        if not is_own:
            found = found.clone(memory_format=torch.contiguous_format)
        return HostTensor.save(found, self._streams)
