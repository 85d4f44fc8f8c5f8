"""What the server answers about breakpoints."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from app.breakpoints import LAST, Action, Breakpoint, Edit, EditOp, OnTimeout, Pass, Positions, When
from app.schemas.edits import TAKEN_BY
from app.tensors import norm


class WhenView(BaseModel):
    """Which positions of which passes. Conditions that are null hold everywhere."""

    model_config = ConfigDict(serialize_by_alias=True)

    in_pass: Pass = Field(serialization_alias="pass")
    position: int | None
    token_id: int | None
    every: int | None

    @classmethod
    def of(cls, when: When) -> Self:
        """The wire form of `when`."""
        return cls(in_pass=when.in_pass, position=when.position, token_id=when.token_id, every=when.every)


class EditVectorView(BaseModel):
    """The vector of an edit, as it was when the edit was sent: its length in numbers, and its L2 length."""

    size: int
    norm: float


class EditView(BaseModel):
    """One change. Fields that do not go with `op` are null."""

    op: EditOp
    factor: float | None
    vector: EditVectorView | None
    positions: Literal["last", "all"] | list[int]
    max_norm: float | None

    @classmethod
    def of(cls, edit: Edit) -> Self:
        """The wire form of `edit`, which is one of a breakpoint's."""
        vector = edit.vector and EditVectorView(size=edit.vector.shape[0], norm=norm(edit.vector))
        return cls(
            op=edit.op,
            factor=edit.factor if edit.op in TAKEN_BY["factor"] else None,
            vector=vector,
            positions=_positions(edit.positions),
            max_norm=edit.max_norm,
        )


class BreakpointView(BaseModel):
    """An armed breakpoint. `timeout_s` and `on_timeout` are for the pauses of one that pauses."""

    id: str
    layers: list[int]
    action: Action
    when: WhenView
    edits: list[EditView]
    once: bool
    timeout_s: float
    on_timeout: OnTimeout

    @classmethod
    def of(cls, armed: Breakpoint) -> Self:
        """The wire form of `armed`."""
        return cls(
            id=armed.id,
            layers=list(armed.layers),
            action=armed.action,
            when=WhenView.of(armed.when),
            edits=[EditView.of(edit) for edit in armed.edits],
            once=armed.once,
            timeout_s=armed.timeout_s,
            on_timeout=armed.on_timeout,
        )


class BreakpointList(BaseModel):
    """A session's breakpoints in the order in which they were armed, which is the order in which they act."""

    data: list[BreakpointView]


def _positions(positions: Positions) -> Literal["last", "all"] | list[int]:
    if positions.end is not None:
        return [positions.first, positions.end]
    return "last" if positions == LAST else "all"
