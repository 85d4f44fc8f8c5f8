"""The edits of a request with the numbers that they name: of uploaded vectors, and of what sessions keep."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.domain.activations import Activation, CheckpointInfo, Dictionary, StoredProbe, UploadKind
from app.domain.breakpoints import (
    ALL,
    Edit,
    EditOp,
    Feature,
    Gate,
    OfTopK,
    Part,
    PartKind,
    Positions,
    TensorData,
    check_bytes,
)
from app.domain.errors import FieldOutOfRange, NotFound
from app.domain.points import ABOUT, WHOLE, Axis, Point, find_point
from app.routers.dependencies import Services
from app.wire.edits import DIRECTION_LENGTHS, EditBody, FeatureBody, KeptBody, ValueFields, fits, to_positions
from app.wire.points import Target, check_part, find_target, place_at
from app.wire.tensors import first_infinite, norm, to_float32, vector_of

MAX_SHARE = 1e-6
"""Of a vector's length: what is left of one that lies along another is rounding."""


def checkpoint_target(services: Services, info: CheckpointInfo) -> Target:
    """Where a paused turn's checkpoint is."""
    return replace(place_at(services.info, info.point, info.layer), is_paused=True)


async def to_edits(
    bodies: Sequence[EditBody], services: Services, owner: str | None, target: Target
) -> tuple[Edit, ...]:
    """The edits at `target` with the numbers of their vectors.

    Raises `NotFound` for a vector or a session that the owner does not have, `FieldOutOfRange` for what does not fit
    the target, and for what no session keeps.
    """
    made = list[Edit]()
    for index, body in enumerate(bodies):
        made.append(await _EditMaker(services, owner, target, f"edits.{index}").make(body))
        check_bytes(made, param=f"edits.{index}")
    return tuple(made)


async def to_gate(when: ValueFields, services: Services, owner: str | None, target: Target) -> Gate:
    """The condition of `when` on a value at `target`. Raises `NotFound`, `FieldOutOfRange`."""
    return await _EditMaker(services, owner, target, "when").gate(when, "when")


class FeatureRow(NamedTuple):
    """A feature of a dictionary: its `encoder` and `decoder`, float32 `[width]`."""

    dictionary: Dictionary
    encoder: NDArray[np.float32]
    decoder: NDArray[np.float32]
    rule: Feature


class _EditMaker:
    """Makes one edit; `param` is the name of its field."""

    def __init__(self, services: Services, owner: str | None, target: Target, param: str) -> None:
        self._services, self._owner, self._target, self._param = services, owner, target, param

    async def make(self, body: EditBody) -> Edit:
        part, positions = self._part(body), to_positions(body.positions)
        feature: Feature | None = None
        vector: TensorData | None
        if body.source is not None:
            vector, positions = await self._kept(body.op, body.source, positions)
        elif body.feature is not None:
            vector, feature = await self._feature(body.op, body.feature, part)
        else:
            vector = self._vector(body, part)
        edit = Edit(
            op=body.op,
            factor=1.0 if body.factor is None else body.factor,
            vector=vector,
            positions=positions,
            max_norm=body.max_norm,
            part=part,
            keep_norm=body.keep_norm,
            gate=None if body.when is None else await self.gate(body.when, f"{self._param}.when"),
            feature=feature,
        )
        if vector is not None and not fits(edit, self._target.shapes[0].width):
            (shortest, longest), param = DIRECTION_LENGTHS, f"{self._param}.vector"
            told = (
                f"{shortest} to {longest}, not {norm(vector)}"
                if part is None
                else f"{shortest} to {longest} in its part"
            )
            raise FieldOutOfRange.at(param, f"for {body.op} its length must be from {told}")
        return edit

    def _part(self, body: EditBody) -> Part | None:
        if body.part is None:
            return None
        kind, chosen = body.part
        return Part(kind, chosen, check_part(kind, chosen, self._target, param=f"{self._param}.{kind}"))

    def _vector(self, body: EditBody, part: Part | None) -> TensorData | None:
        if body.vector is None:
            return None
        param, width = f"{self._param}.vector", self._target.shape().width
        vector = self._numbers(body.vector, param)
        size = vector.shape[0]
        wanted = {width}
        if part is not None:
            wanted.add(width // part.of if part.kind is PartKind.HEADS else len(part.chosen))
        if size not in wanted:
            sizes = " or ".join(str(each) for each in sorted(wanted))
            raise FieldOutOfRange.at(param, f"it must have {sizes} numbers, not {size}")
        if body.orthogonal_to is None:
            return vector
        return self._orthogonal(vector, self._numbers(body.orthogonal_to, f"{self._param}.orthogonal_to"))

    def _numbers(self, field: str | list[float], param: str) -> TensorData:
        if isinstance(field, str):
            named = self._services.uploads.get(self._owner, UploadKind.VECTOR, field, TensorData, param=param)
            return vector_of(to_float32(named))
        return vector_of(field)

    def _orthogonal(self, vector: TensorData, other: TensorData) -> TensorData:
        """What is left of the vector without its part along the other, computed in float64."""
        param = f"{self._param}.orthogonal_to"
        if other.shape != vector.shape:
            size, wanted = other.shape[0], vector.shape[0]
            raise FieldOutOfRange.at(param, f"it must have {wanted} numbers as the vector has, not {size}")
        if not norm(other):
            raise FieldOutOfRange.at(param, "it is zero, and nothing is along it")
        before, unit = to_float32(vector).astype(np.float64), to_float32(other).astype(np.float64) / norm(other)
        left = before - (before @ unit) * unit
        if np.linalg.norm(left) <= MAX_SHARE * np.linalg.norm(before):
            raise FieldOutOfRange.at(param, "the vector lies along it, and nothing of it is left")
        return vector_of(left.astype(np.float32))

    async def _feature(self, op: EditOp, body: FeatureBody, part: Part | None) -> tuple[TensorData, Feature | None]:
        """What the edit keeps of the dictionary, so that it needs the dictionary no more."""
        param = f"{self._param}.feature"
        if part is not None:
            raise FieldOutOfRange.at(param, "it goes without heads, neurons and experts")
        found = await self._read_feature(body, param)
        if op is EditOp.ADD:
            if found.decoder.shape != (self._target.shape().width,):
                width = found.decoder.shape[0]
                raise FieldOutOfRange.at(param, f"its decoder has {width} numbers, another width")
            return vector_of(found.decoder), None
        dictionary, rule = found.dictionary, found.rule
        self._require_at(dictionary.writes, body, dictionary, param)
        if dictionary.writes is not dictionary.point:
            if self._target.is_paused:
                raise FieldOutOfRange.at(
                    param,
                    f"a transcoder reads {dictionary.point}, which is not there any more at a pause: edit "
                    "with a breakpoint",
                )
            rule = replace(rule, reads=dictionary.point)
        return vector_of(np.concatenate([found.encoder, found.decoder])), rule

    def _require_at(self, point: Point, body: FeatureBody, found: Dictionary, param: str) -> None:
        """Raise `FieldOutOfRange` unless the target is that point of the dictionary's layer."""
        if (self._target.point, self._target.layers) != (point, (found.layer,)):
            raise FieldOutOfRange.at(
                f"{param}.dictionary", f"{body.dictionary} is for {point} of layer {found.layer} alone"
            )

    async def _read_feature(self, body: FeatureBody, param: str) -> FeatureRow:
        uploads, named = self._services.uploads, f"{param}.dictionary"
        found = uploads.get(self._owner, UploadKind.DICTIONARY, body.dictionary, Dictionary, param=named)
        if body.index >= found.features:
            raise FieldOutOfRange.at(f"{param}.index", f"{body.index} must be from 0 to {found.features - 1}")
        names = ("encoder", "decoder", "scale", "bias", "gate", "threshold")
        of_topk = None if found.k is None else OfTopK(found.file.digest, found.width, found.k, body.index)
        if of_topk is not None:
            uploads.require_loaded(found, UploadKind.DICTIONARY)
        encoder, decoder, *rule = await asyncio.to_thread(uploads.rows, found.file, body.index, names)
        scale, bias, gate, threshold = map(float, rule)
        return FeatureRow(found, encoder, decoder, Feature(scale, bias, gate, threshold, of_topk))

    async def gate(self, values: ValueFields, field: str) -> Gate:
        """The condition that came in that field."""
        if ABOUT[self._target.point].axis in (Axis.KEYS, Axis.STATE):
            wrong = f"{field}: {self._target.point} has no row of numbers at a position, from which a value follows"
            raise FieldOutOfRange(wrong, param=field)
        if values.feature is not None:
            return await self._feature_gate(values, values.feature, f"{field}.feature")
        if values.probe is not None:
            return await self._probe_gate(values, values.probe, f"{field}.probe")
        assert values.along is not None
        param, width = f"{field}.along", self._target.shape().width
        along = self._numbers(values.along, param)
        if along.shape[0] != width:
            raise FieldOutOfRange.at(param, f"it must have {width} numbers, not {along.shape[0]}")
        return Gate(along, values.above, values.below)

    async def _probe_gate(self, body: ValueFields, name: str, param: str) -> Gate:
        """The logistic function rises, so ends of what it gives are ends of what it takes."""
        uploads, target = self._services.uploads, self._target
        found = uploads.get(self._owner, UploadKind.PROBE, name, StoredProbe, param=param)
        if (target.point, target.layers) != (found.point, (found.layer,)):
            raise FieldOutOfRange.at(param, f"{name} is for {found.point} of layer {found.layer} alone")

        def end(value: float | None) -> float | None:
            if value is None or not found.sigmoid:
                return value
            if not 0 < value < 1:
                raise FieldOutOfRange.at(param, "its values are compared with numbers between 0 and 1")
            return float(np.float32(math.log(value) - math.log1p(-value)))

        weights = vector_of(await asyncio.to_thread(uploads.numbers, found.file))
        return Gate(weights, end(body.above), end(body.below), found.hidden)

    async def _feature_gate(self, body: ValueFields, named: FeatureBody, param: str) -> Gate:
        """The activation of a feature rises with `h . encoder`, so its ends are ends of that."""
        found = await self._read_feature(named, param)
        self._require_at(found.dictionary.point, named, found.dictionary, param)
        rule = found.rule
        least = rule.threshold - rule.gate

        def end(value: float | None) -> float | None:
            if value is None:
                return None
            if value < 0 or rule.scale <= 0:
                raise FieldOutOfRange.at(param, "an activation is compared with numbers from 0")
            return float(np.float32(max((value - rule.bias) / rule.scale, least)))

        return Gate(vector_of(found.encoder), end(body.above), end(body.below), of_topk=rule.of_topk)

    async def _kept(self, op: EditOp, source: KeptBody, positions: Positions) -> tuple[TensorData, Positions]:
        """What a session keeps, and the positions that it is for."""
        found, param = await self._read_kept(source), f"{self._param}.from"
        tensor, width = found.tensor, self._target.shape().width
        if tensor.shape[1] != width:
            raise FieldOutOfRange.at(
                param,
                f"{self._target.point} has {width} numbers at a position, but what is kept there has {tensor.shape[1]}",
            )
        if (at := first_infinite(tensor)) is not None:
            raise FieldOutOfRange.at(param, f"position {found.first + at // width} is not finite")
        if op is EditOp.ABLATE:
            return vector_of(to_float32(tensor).astype(np.float64).mean(0).astype(np.float32)), positions
        rows = found.end - found.first
        if positions == ALL:
            return tensor, Positions(found.first, found.end)
        wanted = 1 if positions.end is None else positions.end - positions.first
        if rows == 1:
            return vector_of(to_float32(tensor)[0]), positions
        if rows != wanted:
            raise FieldOutOfRange.at(
                f"{self._param}.positions",
                f"{wanted} cannot be given what {rows} keep, {found.first}:{found.end}: name "
                "as many, or leave positions out for the same ones",
            )
        return tensor, positions

    async def _read_kept(self, source: KeptBody) -> Activation:
        services, param = self._services, f"{self._param}.from"
        name, layers = source.point or self._target.point.value, dict[str, int]()
        point, own = find_point(name) or (None, None)
        if source.layer is not None:
            layers = {f"{param}.layer": source.layer}
        elif own is None and point not in WHOLE:
            if len(self._target.layers) > 1:
                raise FieldOutOfRange.at(f"{param}.layer", "name one, for the edit is made in several")
            layers = {f"{param}.layer": self._target.layers[0]}
        place = find_target(services.info, name, layers, param=f"{param}.point")
        try:
            with services.sessions.table.using(source.session, self._owner) as session:
                kept = await services.sessions.whitebox.read_kept(
                    session, place.point, place.layers[0], to_positions(source.positions)
                )
        except NotFound as error:
            raise NotFound(error.message, param=f"{param}.session") from error
        except FieldOutOfRange as error:
            raise FieldOutOfRange(f"{param}.{error.message}", param=f"{param}.{error.param}") from error
        return kept
