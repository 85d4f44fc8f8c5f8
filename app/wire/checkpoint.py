"""Bodies about checkpoints, and the body that ends a pause."""

import re
import time
from dataclasses import asdict
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from app.domain.activations import CheckpointInfo, LensRows
from app.domain.breakpoints import ALL, LAST, NEXT_BREAKPOINT, Action, Positions, Until
from app.domain.points import Point
from app.domain.values import ModelInfo
from app.text.tokenizer import Tokens
from app.wire.base import QueryModel, WireModel
from app.wire.breakpoints import ForwardPass
from app.wire.edits import Edits
from app.wire.points import Layer, PointName, check_action, find_target

RANGE = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)


def _require_positions(text: str) -> str:
    if text in ("last", "all"):
        return text
    found = RANGE.fullmatch(text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError("last, all, or first:end with first lower than end, which is not included")
    return text


PositionsText = Annotated[str, AfterValidator(_require_positions)]


class ActivationQuery(QueryModel):
    """Which positions to read."""

    positions: PositionsText = Field("all", description="last, all, or first:end, positions in the session's history")

    def to_positions(self) -> Positions:
        """`positions` in the engine's form."""
        if self.positions in ("last", "all"):
            return LAST if self.positions == "last" else ALL
        first, end = self.positions.split(":")
        return Positions(int(first), int(end))


class LensQuery(ActivationQuery):
    """What the model would say at which positions."""

    positions: PositionsText = Field(
        "last", description="last, all, or first:end, positions in the session's history; at most 64"
    )
    top_k: int = Field(5, ge=1, le=20, description="tokens to report for each position")


class EditCheckpointBody(WireModel):
    """Changes of a checkpoint, made in this order; all or none."""

    edits: Edits


class UntilLayer(WireModel):
    """To a point that comes later in the same pass, of this layer or a higher one."""

    layer: Layer
    point: PointName = Field(Point.RESID_POST.value, description="where in the layer")


UntilField = Annotated[
    Annotated[UntilLayer, Tag("a layer")] | Annotated[Literal["next_token", "end"], Tag("a word")],
    Discriminator(lambda value: "a word" if isinstance(value, str) else "a layer"),
]


class ResumeBody(WireModel):
    """How to go on with a paused turn: with what changes, and how far."""

    edits: Edits | None = Field(None, description="made before the turn goes on")
    until: UntilField | None = Field(
        None,
        description="a layer of this pass; next_token: the same layer in the pass of the next token; end: past every "
        "breakpoint; absent: to the next breakpoint or the end",
    )
    stream: bool = Field(False, description="answer with server-sent events")

    def to_until(self, info: ModelInfo) -> Until:
        """`until` in the engine's form, which checks that its layer is there and above. Raises `FieldOutOfRange` for a
        point that the model lacks, or where no pass can stop.
        """
        if isinstance(self.until, UntilLayer):
            layer, name = self.until.layer, self.until.point
            if layer >= info.num_layers:
                return Until(layer=layer)
            point = find_target(info, name, {"until.layer": layer}, param="until.point").point
            check_action(Action.PAUSE, point, param="until.point")
            return Until(layer=layer, point=point)
        if self.until is None:
            return NEXT_BREAKPOINT
        return Until(next_token=self.until == "next_token", end=self.until == "end")


class CheckpointView(BaseModel):
    """A pass over positions `[first, end)` of the history that has stopped at a `point` of `layer`.

    It holds what stands there, of `shape` `[end - first, hidden_size]` in `dtype`: the residual stream, or as many
    numbers as the point is wide. `breakpoint` is null where `until` stopped it; `saved_ms` is how long it took to leave
    the batch. Times are Unix seconds; `age_s` is counted from
    `created_at` to the answer.
    """

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    layer: int
    point: Point
    first: int
    end: int
    shape: tuple[int, int]
    hidden_size: int
    dtype: str
    bytes: int
    in_pass: ForwardPass = Field(alias="pass")
    breakpoint: str | None
    saved_ms: float
    created_at: float
    age_s: float
    expires_at: float | None = Field(description="null if the pause was over when this was written")

    @classmethod
    def of(cls, info: CheckpointInfo, expires_at: float | None) -> Self:
        """The wire form of `info`."""
        return cls(
            **asdict(info),
            shape=(info.end - info.first, info.hidden_size),
            age_s=max(0.0, time.time() - info.created_at),
            expires_at=expires_at,
        )


class LensTokenView(BaseModel):
    """A token that could come next, with its natural-log probability."""

    token_id: int
    text: str
    logprob: float | None = Field(description="null where the residual stream is not finite")


class LensPositionView(BaseModel):
    """What the model would say at a position where `token_id` stands, best first."""

    position: int
    token_id: int
    text: str
    top: list[LensTokenView]


class LensView(BaseModel):
    """The logit lens: the final norm and the head, applied to what is there after `layer`."""

    layer: int
    positions: list[LensPositionView]

    @classmethod
    def of(cls, layer: int, found: LensRows, tokens: Tokens) -> Self:
        """The wire form of what was found at a checkpoint after that layer."""
        text, positions = tokens.token_text, []
        for position, (token_id, row) in enumerate(zip(found.token_ids, found.rows, strict=True), found.first):
            top = [LensTokenView(token_id=each, text=text(each), logprob=logprob) for each, logprob in row]
            positions.append(LensPositionView(position=position, token_id=token_id, text=text(token_id), top=top))
        return cls(layer=layer, positions=positions)
