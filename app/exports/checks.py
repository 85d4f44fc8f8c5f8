"""The one check of a snapshot: it comes from a client or another server, and the engine trusts it."""

from __future__ import annotations

import math
import re
from array import array
from itertools import pairwise

import numpy as np

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import (
    MAX_INTERVENTION_BYTES,
    MAX_INTERVENTIONS,
    MAX_PASS_EDITS,
    MAX_WORK,
    Action,
    Breakpoint,
    Edit,
    EditOp,
    Gate,
    Intervention,
    OfTopK,
    PartKind,
    Pass,
    TensorData,
    Then,
    work_of,
)
from app.domain.points import ABOUT, Axis, Point, PointShape
from app.domain.values import ModelInfo
from app.exports.snapshot import PausedTurnSnapshot, SessionSnapshot, check_text
from app.sessions.registry import SessionRegistry
from app.sessions.whitebox import MAX_BREAKPOINTS
from app.wire.base import MAX_COUNT
from app.wire.breakpoints import MAX_TIMEOUT_S, MAX_TOP_K, MIN_TIMEOUT_S
from app.wire.dictionaries import MAX_FEATURES
from app.wire.edits import MAX_EDITS, MAX_FACTOR, MAX_FLOAT32, NEEDED_BY, TAKEN_BY, VECTOR_NAME, fits
from app.wire.points import PARTS
from app.wire.probes import MAX_HIDDEN
from app.wire.tensors import EXPONENTS, to_float32

ID = re.compile(r"bp_[0-9a-f]{16}")


def read_snapshot(registry: SessionRegistry, text: bytes, history: array[int]) -> SessionSnapshot:
    """The snapshot of a session with that history, which a client or another server has sent. Takes long.

    Raises `ValueError` or `FieldOutOfRange` for a text that no server has written.
    """
    check_text(text, len(history))
    snapshot = SessionSnapshot.from_json(text)
    SnapshotChecks(registry.executor.engine.info, history, part_tokens=registry.part_tokens).check(snapshot)
    return snapshot


NO_VECTOR = TensorData("float32", (0,), b"")


class SnapshotChecks:
    """Checks a snapshot against the model that it is for, the history that it came with, and the length of a pass here.

    Every method raises `ValueError` or `FieldOutOfRange` for a snapshot that no server has exported.
    """

    def __init__(self, info: ModelInfo, history: array[int], *, part_tokens: int) -> None:
        self._info = info
        self._history = history
        self._part_tokens = part_tokens
        self._finite = set[TensorData]()
        """Those whose values have been looked at: a snapshot may name one often."""

    def check(self, snapshot: SessionSnapshot) -> None:
        """Check all of it."""
        ids = [each.id for each in snapshot.breakpoints]
        _require(len(set(ids)) == len(ids) <= MAX_BREAKPOINTS, "breakpoints")
        for breakpoint in snapshot.breakpoints:
            self._check_breakpoint(breakpoint)
        _require(
            work_of(snapshot.breakpoints) <= MAX_WORK, f"breakpoints: more than {MAX_WORK} edits and captures in a pass"
        )
        self._check_interventions(snapshot.interventions)
        if snapshot.turn is not None:
            self._check_turn(snapshot.turn)

    def _check_breakpoint(self, breakpoint: Breakpoint) -> None:
        layers, when, info = breakpoint.layers, breakpoint.when, self._info
        _require(ID.fullmatch(breakpoint.id) is not None, "id")
        _require(0 < len(layers) == len(set(layers)), "layers")
        _require(all(0 <= layer < info.num_layers for layer in layers), "layers")
        _require(when.position is None or 0 <= when.position < info.max_model_len, "position")
        _require(when.token_id is None or 0 <= when.token_id < info.vocab_size, "token_id")
        _require(when.every is None or when.every >= 1, "every")
        _require(MIN_TIMEOUT_S <= breakpoint.timeout_s <= MAX_TIMEOUT_S, "timeout_s")
        edits = len(breakpoint.edits)
        shapes = [self._shape(breakpoint.point, layer) for layer in layers]
        doing = {Action.EDIT: ABOUT[breakpoint.point].edits, Action.PAUSE: ABOUT[breakpoint.point].pauses}
        _require(doing.get(breakpoint.action, True), "point")
        heads = breakpoint.heads
        _require(not heads or breakpoint.action is Action.CAPTURE, "heads")
        _require(not heads or (_rise(heads) and heads[-1] < min(shape.heads for shape in shapes)), "heads")
        features, gate = breakpoint.features, breakpoint.gate
        _require((features is not None) == (breakpoint.action is Action.FEATURES), "features")
        if features is not None:
            _require(
                1 <= features.top_k <= MAX_TOP_K and re.fullmatch(VECTOR_NAME, features.name) is not None, "features"
            )
            _require(features.k is None or 1 <= features.k <= MAX_FEATURES, "features")
            _require(features.width == shapes[0].width, "features")
        if gate is not None:
            pauses = breakpoint.action is Action.PAUSE
            _require(breakpoint.action is Action.CAPTURE or (pauses and not info.state_bytes), "gate")
            for shape in shapes:
                self._check_gate(gate, shape)
        probe = breakpoint.probe
        _require((probe is not None) == (breakpoint.action is Action.PROBE), "probe")
        if probe is not None:
            width = shapes[0].width
            numbers = _weights(probe.hidden, width)
            _require(0 <= probe.hidden <= MAX_HIDDEN and re.fullmatch(VECTOR_NAME, probe.name) is not None, "probe")
            _require(probe.above is None or abs(probe.above) <= MAX_FLOAT32, "probe")
            _require(probe.then is not Then.PAUSE or not info.state_bytes, "probe")
            self._check_tensor(probe.weights, (numbers,), "float32")
        _require(1 <= edits <= MAX_EDITS if breakpoint.action is Action.EDIT else edits == 0, "edits")
        for edit in breakpoint.edits:
            for shape in shapes:
                self._check_edit(edit, shape, ABOUT[breakpoint.point].axis, layer=layers[0])

    def _check_interventions(self, interventions: tuple[Intervention, ...]) -> None:
        runs = sum(len(made.runs) for made in interventions)
        _require(runs <= MAX_INTERVENTIONS, f"interventions: more than {MAX_INTERVENTIONS}")
        found = [tensor for made in interventions for tensor in made.edit.tensors]
        vectors = {each for each in found if len(each.shape) == 1}
        written = [each for each in found if len(each.shape) != 1]
        tensor_bytes = sum(len(each.data) for each in (*vectors, *written))
        _require(tensor_bytes <= MAX_INTERVENTION_BYTES, f"interventions: more than {MAX_INTERVENTION_BYTES} bytes")
        for made in interventions:
            _require(0 <= made.first < made.end <= len(self._history), "positions")
            _require(not made.only or _are_runs(made), "positions")
            _require(1 <= made.boundary <= self._info.num_layers, "boundary")
            about = ABOUT[made.point]
            _require(about.edits, "point")
            shape = self._shape(made.point, made.boundary - 1)
            self._check_edit(made.edit, shape, about.axis, rows=made.end - made.first, layer=made.boundary - 1)
        edits_at = np.zeros(len(self._history) + 1, np.int64)
        for run in (run for made in interventions for run in made.runs):
            edits_at[run.first : run.end : run.step] += 1
        deepest = int(edits_at.max())
        _require(deepest <= MAX_PASS_EDITS, f"interventions: more than {MAX_PASS_EDITS} at one position")

    def _shape(self, point: Point, layer: int) -> PointShape:
        """That of the point in the layer."""
        shape = self._info.points[point][layer] if point in self._info.points else None
        if shape is None:
            raise ValueError("invalid point")
        return shape

    def _check_gate(self, gate: Gate, shape: PointShape) -> None:
        ends = [end for end in (gate.above, gate.below) if end is not None]
        _require(bool(ends) and all(abs(end) <= MAX_FLOAT32 for end in ends), "gate")
        _require(gate.hidden is None or 0 <= gate.hidden <= MAX_HIDDEN, "gate")
        numbers = shape.width if gate.hidden is None else _weights(gate.hidden, shape.width)
        self._check_tensor(gate.along, (numbers,), "float32")
        _check_topk(gate.of_topk, shape)

    def _check_edit(self, edit: Edit, shape: PointShape, axis: Axis, rows: int | None = None, *, layer: int) -> None:
        """`rows` is how many positions the edit was made at, by whatever factor; one that is still to be made has as
        many as its positions, if it has rows.
        """
        positions, vector = edit.positions, edit.vector
        _require(abs(edit.factor) <= (MAX_FACTOR if rows is None else MAX_FLOAT32), "factor")
        _require(edit.max_norm is None or 0 < edit.max_norm <= MAX_FLOAT32, "max_norm")
        _require(positions.first >= 0 and (positions.end is None or positions.end > positions.first), "positions")
        _require(not (edit.keep_norm and edit.max_norm), "keep_norm")
        if edit.feature is None:
            _require(edit.op in (TAKEN_BY if vector else NEEDED_BY)["vector"] or not vector, "vector")
            _require(bool(vector) or edit.op not in NEEDED_BY["vector"], "vector")
        if edit.gate is not None:
            self._check_gate(edit.gate, shape)
        part, sizes = edit.part, {shape.width}
        if part is not None:
            in_heads = part.kind is PartKind.HEADS
            _require(axis in PARTS[part.kind] and part.of == (shape.heads if in_heads else shape.width), "part")
            _require(_rise(part.chosen) and part.chosen[-1] < part.of, "part")
            sizes.add(shape.width // part.of if in_heads else len(part.chosen))
        if edit.feature is not None:
            reads = edit.feature.reads
            read = shape if reads is None else self._shape(reads, layer)
            _require(edit.op in (EditOp.SCALE, EditOp.CLAMP, EditOp.ABLATE) and part is None, "feature")
            rule = edit.feature.scale, edit.feature.bias, edit.feature.gate, edit.feature.threshold
            _require(all(abs(number) <= MAX_FLOAT32 for number in rule), "feature")
            _check_topk(edit.feature.of_topk, read)
            self._check_tensor(vector or NO_VECTOR, (read.width + shape.width,), "float32")
            return
        if vector is None:
            return
        _require(vector.shape[-1] in sizes, "shape")
        if len(vector.shape) == 2:
            wanted = rows if rows is not None else (positions.end or 0) - positions.first
            _require(edit.op in (EditOp.REPLACE, EditOp.ADD) and vector.shape[0] >= wanted > 0, "vector")
            self._check_tensor(vector, vector.shape, self._info.dtype)
        else:
            self._check_tensor(vector, (vector.shape[0],), "float32")
        _require(fits(edit, shape.width), "vector length")

    def _check_tensor(self, tensor: TensorData, shape: tuple[int, ...], dtype: str) -> None:
        _require((tensor.shape, tensor.dtype) == (shape, dtype), "shape")
        width = np.dtype(EXPONENTS[dtype][0]).itemsize
        _require(len(tensor.data) == math.prod(shape) * width, "data")
        _require(tensor in self._finite or bool(np.isfinite(to_float32(tensor)).all()), "values")
        self._finite.add(tensor)

    def _check_turn(self, turn: PausedTurnSnapshot) -> None:
        tokens, info, fields = len(self._history), self._info, turn.fields
        generated = tokens - turn.prompt_tokens
        _require(fields.max_tokens is not None and 0 <= generated <= max(0, fields.max_tokens - 1), "max_tokens")
        _require(len(turn.logprobs) == (0 if fields.logprobs is None else generated), "logprobs")
        fields.check_vocabulary(info.vocab_size)
        named = (token for each in turn.logprobs for token in (each.token_id, *(other for other, _ in each.top)))
        _require(all(0 <= token <= MAX_COUNT for token in named), "logprobs")
        place = turn.checkpoint
        self._check_span(place, turn.prompt_tokens)
        _require(0 <= place.layer < info.num_layers, "layer")
        width = self._shape(place.point, place.layer).width
        _require(ABOUT[place.point].pauses and (place.hidden_size, place.dtype) == (width, info.dtype), "checkpoint")
        _require(place.bytes == len(turn.hidden.data), "checkpoint")
        _require(place.breakpoint is None or ID.fullmatch(place.breakpoint) is not None, "checkpoint")
        _require(math.isfinite(place.saved_ms) and math.isfinite(place.created_at), "checkpoint")
        self._check_tensor(turn.hidden, (place.end - place.first, width), info.dtype)
        self._check_interventions(turn.interventions)

    def _check_span(self, place: CheckpointInfo, prompt_tokens: int) -> None:
        """A context is computed part by part before anything is generated; then each pass is for the newest token."""
        tokens, span = len(self._history), f"checkpoint: a {place.in_pass} pass over {place.first}:{place.end}"
        _require(0 <= place.first < place.end <= tokens, span)
        match place.in_pass:
            case Pass.PREFILL:
                _require(tokens == prompt_tokens, f"{span} after {tokens - prompt_tokens} generated tokens")
                _require(place.end - place.first <= self._part_tokens, f"{span}, more than {self._part_tokens} tokens")
            case Pass.DECODE:
                _require(prompt_tokens <= place.first == tokens - 1, f"{span} of {tokens} tokens")
            case Pass.ANY:
                _require(False, span)


def _weights(hidden: int, width: int) -> int:
    """How many numbers a probe has."""
    return hidden * (width + 2) + 1 if hidden else width + 1


def _check_topk(feature: OfTopK | None, read: PointShape) -> None:
    if feature is not None:
        _require(1 <= feature.k <= MAX_FEATURES and 0 <= feature.index < MAX_FEATURES, "feature")
        _require(feature.width == read.width, "feature")


def _rise(numbers: tuple[int, ...]) -> bool:
    return bool(numbers) and numbers[0] >= 0 and all(before < after for before, after in pairwise(numbers))


def _are_runs(made: Intervention) -> bool:
    """Whether the positions of an edit that leaves some out are as the engine writes them."""
    runs, ends = made.only, (made.only[0].first, made.only[-1].end)
    rise = all(before.end <= after.first for before, after in pairwise(runs))
    whole = all(run.step >= 1 and run.first < run.end == run.positions[-1] + 1 for run in runs)
    return rise and whole and ends == (made.first, made.end) and not made.edit.has_rows


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"invalid {what}")
