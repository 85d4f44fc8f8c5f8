"""What the journal keeps of a session's breakpoints, as JSON with a digest in the place of each vector's data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter

from app.domain.breakpoints import Breakpoint, Intervention
from app.domain.tensor_swaps import Swap, swapped_breakpoint, swapped_intervention


@dataclass(frozen=True, slots=True)
class Steering:
    """The breakpoints that are armed, and the interventions that the history was computed with."""

    breakpoints: tuple[Breakpoint, ...] = ()
    interventions: tuple[Intervention, ...] = ()


NO_STEERING = Steering()


@dataclass(frozen=True, slots=True)
class InterventionChange:
    """A session has `count` interventions now; `rows` are those of them that are new or changed, by their place."""

    count: int
    rows: Mapping[int, Intervention]

    @classmethod
    def between(cls, before: tuple[Intervention, ...], after: tuple[Intervention, ...]) -> InterventionChange | None:
        """What makes `after` of `before`; None if they are the same."""
        if after is before:
            return None
        rows = {
            number: made
            for number, made in enumerate(after)
            if number >= len(before) or (made is not before[number] and made != before[number])
        }
        return cls(len(after), rows) if rows or len(after) != len(before) else None

    def then(self, later: InterventionChange) -> InterventionChange:
        """This change and a later one of the same session, as one."""
        rows = {**self.rows, **later.rows}
        return InterventionChange(later.count, {number: made for number, made in rows.items() if number < later.count})


def breakpoints_to_json(breakpoints: tuple[Breakpoint, ...], swap: Swap) -> str:
    """As text; `swap` takes the data of each vector and gives its digest."""
    return _BREAKPOINTS.dump_json(tuple(swapped_breakpoint(each, swap) for each in breakpoints)).decode()


def breakpoints_from_json(text: str, swap: Swap) -> tuple[Breakpoint, ...]:
    """What `breakpoints_to_json` wrote; `swap` goes the way back. Raises `ValueError` for anything else."""
    return tuple(swapped_breakpoint(each, swap) for each in _BREAKPOINTS.validate_json(text))


def intervention_to_json(made: Intervention, swap: Swap) -> str:
    """As text, like breakpoints."""
    return _INTERVENTION.dump_json((swapped_intervention(made, swap),)).decode()


def intervention_from_json(text: str, swap: Swap) -> Intervention:
    """What `intervention_to_json` wrote. Raises `ValueError` for anything else."""
    (made,) = _INTERVENTION.validate_json(text)
    return swapped_intervention(made, swap)


_CONFIG = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")
_BREAKPOINTS: TypeAdapter[tuple[Breakpoint, ...]] = TypeAdapter(tuple[Breakpoint, ...], config=_CONFIG)
_INTERVENTION: TypeAdapter[tuple[Intervention]] = TypeAdapter(tuple[Intervention], config=_CONFIG)
"""A dataclass by itself takes no configuration."""
