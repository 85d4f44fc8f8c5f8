"""What is read inside the model while a turn runs, beside its tokens: by probes and by dictionaries; and the field
`djinn`, in which answers of other APIs tell it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, Field

from app.messages import Featured, Probed, Reading
from app.wire.base import View, is_none


def finite(value: float) -> float | None:
    """The value, or null in JSON if it is not finite."""
    return value if math.isfinite(value) else None


class ProbeReading(View):
    """What a probe has found at `positions` of the history: a value for each; null where it is not finite."""

    probe: str
    positions: list[int]
    values: list[Annotated[float | None, BeforeValidator(finite)]]
    halts: bool = Field(description="whether the turn stops or pauses for it")


class FeatureActivation(BaseModel):
    """How active a feature is."""

    index: int
    activation: float | None = Field(description="null if it is not finite")


class FeaturesReading(BaseModel):
    """The most active features of a dictionary at `positions` of the history: for each position a list, the most active
    first, without those that are not active.
    """

    dictionary: str
    positions: list[int]
    top: list[list[FeatureActivation]]

    @classmethod
    def of(cls, found: Featured) -> Self:
        """The wire form of what was found."""
        top = [
            [FeatureActivation(index=index, activation=finite(value)) for index, value in each] for each in found.top
        ]
        return cls(dictionary=found.dictionary, positions=list(found.positions), top=top)


def event_of(found: Reading) -> tuple[str, BaseModel]:
    """The name of the event that tells of it, and its data."""
    if isinstance(found, Probed):
        return "probe", ProbeReading.model_validate(found)
    return "features", FeaturesReading.of(found)


def by_kind(readings: Iterable[Reading]) -> dict[str, Any]:
    """`probes` and `features`, as far as there are any, as answers have them beside the tokens."""
    found = dict[str, list[BaseModel]]()
    for reading in readings:
        kind, view = event_of(reading)
        found.setdefault("probes" if kind == "probe" else kind, []).append(view)
    return found


def djinn_of(readings: Iterable[Reading]) -> dict[str, Any]:
    """The same, in the field `djinn` of an answer of another API."""
    found = {kind: [each.model_dump() for each in views] for kind, views in by_kind(readings).items()}
    return {"djinn": found} if found else {}


class Djinn(BaseModel):
    """What only this server tells of an answer."""

    recomputed_because: str | None = Field(
        None, exclude_if=is_none, description="where the prompt first differs from the session's history"
    )
    probes: list[ProbeReading] | None = Field(
        None,
        exclude_if=is_none,
        description="what the session's probes have found, of all choices; in a stream, lately",
    )
    features: list[FeaturesReading] | None = Field(
        None,
        exclude_if=is_none,
        description="the most active features of the dictionaries that the session reads; in a stream, lately",
    )


DJINN: dict[str, Any] = {
    "djinn": (
        Djinn | None,
        Field(
            None,
            exclude_if=is_none,
            description="if a history was not kept to its end, or probes or features are there",
        ),
    )
}
