"""What a client may ask of a checkpoint, and how it ends a pause."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag

from app.breakpoints import ALL, LAST, NEXT_BREAKPOINT, Positions, Until
from app.schemas.breakpoints import Layer
from app.schemas.edits import Edits
from app.schemas.wire import WireModel

RANGE = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)


def _require_positions(text: str) -> str:
    if text in ("last", "all"):
        return text
    found = RANGE.fullmatch(text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError("Input should be last, all, or first:end with first lower than end, which is not included")
    return text


PositionsText = Annotated[str, AfterValidator(_require_positions)]


class ActivationQuery(WireModel):
    """Which positions to read."""

    model_config = ConfigDict(strict=False)

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
    """To after a higher layer of the same pass."""

    layer: Layer


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

    def to_until(self) -> Until:
        """`until` in the engine's form."""
        if isinstance(self.until, UntilLayer):
            return Until(layer=self.until.layer)
        if self.until is None:
            return NEXT_BREAKPOINT
        return Until(next_token=self.until == "next_token", end=self.until == "end")
