"""What the journal keeps of a session's breakpoints, as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter

from app.domain.breakpoints import Breakpoint, Intervention


@dataclass(frozen=True, slots=True)
class Steering:
    """The breakpoints that are armed, and the interventions that the history was computed with."""

    breakpoints: tuple[Breakpoint, ...] = ()
    interventions: tuple[Intervention, ...] = ()

    def to_json(self) -> str:
        """As text; vectors are base64."""
        return _JSON.dump_json((self.breakpoints, self.interventions)).decode()

    @classmethod
    def from_json(cls, text: str) -> Steering:
        """What `to_json` wrote. Raises `ValueError` for anything else."""
        return cls(*_JSON.validate_json(text))


NO_STEERING = Steering()

_JSON: TypeAdapter[tuple[tuple[Breakpoint, ...], tuple[Intervention, ...]]] = TypeAdapter(
    tuple[tuple[Breakpoint, ...], tuple[Intervention, ...]],
    config=ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"),
)
