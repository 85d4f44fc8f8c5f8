"""The events of a streamed turn."""

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Json
from typing_extensions import TypeAliasType

from app.wire.errors import ErrorBody
from app.wire.turns import TokenEvent, TurnView


class TurnErrorBody(ErrorBody):
    """The error body of a route that answers with a turn."""

    turn: TurnView | None = Field(
        None, description="with `not_durable`: the answer of the turn, which is in the session's history"
    )


class TurnTokenEvent(BaseModel):
    """Tokens that have been generated. `data` is the JSON text of a `TokenEvent`."""

    event: Literal["token"]
    data: Json[TokenEvent]


class TurnPausedEvent(BaseModel):
    """The last event of a turn that has paused. `data` is the JSON text of a `TurnView`."""

    event: Literal["paused"]
    data: Json[TurnView]


class TurnFinishedEvent(BaseModel):
    """The last event of a turn that is over. `data` is the JSON text of a `TurnView`."""

    event: Literal["finished"]
    data: Json[TurnView]


class TurnErrorEvent(BaseModel):
    """The last event of a turn that has failed. `data` is the JSON text of a `TurnErrorBody`."""

    event: Literal["error"]
    data: Json[TurnErrorBody]


TurnEvent = TypeAliasType(
    "TurnEvent",
    Annotated[TurnTokenEvent | TurnPausedEvent | TurnFinishedEvent | TurnErrorEvent, Discriminator("event")],
)
"""One server-sent event of a streamed turn."""
